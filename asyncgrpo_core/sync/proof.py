"""Collects the evidence of each sync and keeps what was proved (the rules themselves: `canary.judge`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from asyncgrpo_core.errors import ConfigError, ServerRefusedError
from asyncgrpo_core.sync.backend import Backend, Parameters, SyncControl, TensorEvidence, Transfer
from asyncgrpo_core.sync.canary import FAILED, PROVED, UNVERIFIED, Evidence, Noise, Verdict, judge
from asyncgrpo_core.sync.checksums import compare_checksums
from asyncgrpo_core.sync.reports import DeliveryError

logger = logging.getLogger(__name__)

MAX_UNVERIFIED_IN_A_ROW = 3
_WORSE = (PROVED, UNVERIFIED, FAILED)  # of several engines the worst decides


class Prover:
    """The delivery proof of one attempt.

    Args:
        backend, control, parameters: see `Publisher`.
        score: the trainer's log-probabilities of canary tokens 1..n-1 under the policy as it is now.
        canary_ids: the canary prompt (token ids, at least two).
        noise: how far right implementations may be apart.
        checksum_dtype: dtype of the server's weights when /weight_checker can be asked, else None.
        fingerprints: the server has our worker extension (one engine), which is asked instead.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        control: SyncControl,
        parameters: Parameters,
        score: Callable[[list[int]], list[float]],
        canary_ids: list[int],
        noise: Noise,
        checksum_dtype: torch.dtype | None = None,
        fingerprints: bool = False,
    ) -> None:
        if len(canary_ids) < 2:
            raise ConfigError("The canary prompt has fewer than two tokens.", "Give it at least two.")
        self._backend = backend
        self._control = control
        self._parameters = parameters
        self._score = score
        self._canary_ids = list(canary_ids)
        self._noise = noise
        self._checksum_dtype = checksum_dtype if backend.evidence_by_checksums else None
        self._fingerprints = fingerprints
        self._proved_scores: list[float] | None = None
        self._trusted_names: set[str] | None = None  # None until checksums were compared once
        self._unverified_in_a_row = 0

    def before_first_sync(self) -> None:
        """Where nearness will have to prove something, what the server computes with now is "the old weights"."""
        if not self._noise.exact:
            self._proved_scores = self._control.prompt_logprobs(self._canary_ids)

    def examine(self, transfer: Transfer) -> Verdict:
        """Judge a sync that was just made; the server generates again. `transfer.evidence` may be filled in.

        Raises:
            ServerError: the server did not score the canary or give its checksums.
        """
        requests = transfer.canary_requests
        answers = [self._control.prompt_logprobs(self._canary_ids, **request) for request in requests]
        trainer = [float(value) for value in self._score(self._canary_ids)]
        verdicts = [self._judge(server, trainer, transfer.evidence) for server in answers]
        verdict = max(verdicts, key=lambda found: (_WORSE.index(found.state), found.max_abs_diff))
        server = answers[verdicts.index(verdict)]
        # Also once when the canary is enough: names that match now can be trusted when it is not.
        if self._checksum_dtype is not None and (verdict.state != PROVED or self._trusted_names is None):
            transfer.evidence = self._checksums(self._checksum_dtype)
            verdict = self._judge(server, trainer, transfer.evidence)
        if verdict.state == PROVED:
            self._proved_scores = trainer
            self._trust(transfer.evidence)
        return verdict

    def count(self, version: int, verdict: Verdict) -> None:
        """Count what could not be proved.

        Raises:
            DeliveryError: the third time in a row.
        """
        if verdict.state in (PROVED, FAILED):
            self._unverified_in_a_row = 0
            return
        self._unverified_in_a_row += 1
        logger.warning("weight sync %s could not be proved: %s", version, verdict.reason)
        if self._unverified_in_a_row >= MAX_UNVERIFIED_IN_A_ROW:
            raise DeliveryError(
                f"{self._unverified_in_a_row} weight syncs in a row (the last is policy version {version}) could "
                f"not be proved: {verdict.reason}.",
                "Raise verify_sync_every so that the policy moves more between two proofs, use float32 on both sides, "
                "or let /weight_checker answer for all tensors (VLLM_SERVER_DEV_MODE=1, no tensor parallelism).",
            )

    def _judge(self, server: list[float], trainer: list[float], tensors: TensorEvidence | None) -> Verdict:
        trusted = self._trusted_names or ()
        return judge(Evidence(server, trainer, self._proved_scores, self._noise, tensors, trusted))

    def _checksums(self, dtype: torch.dtype) -> TensorEvidence | None:
        held = self._fingerprints_held() if self._fingerprints else None
        if held is not None:
            return compare_checksums(held, self._parameters(), dtype, fingerprints=True)
        reply = self._control.weight_checker("checksum")
        return compare_checksums(reply["checksums"], self._parameters(), dtype)

    def _fingerprints_held(self) -> dict[str, str] | None:
        """None, from now on, where this vLLM's workers cannot: what they are made of is not vLLM's public interface."""
        try:
            return self._control.weight_fingerprints()
        except ServerRefusedError as error:
            self._fingerprints = False
            logger.warning("The server cannot digest its weights in place; it makes sha256 digests, slowly: %s", error)
            return None

    def _trust(self, evidence: TensorEvidence | None) -> None:
        if self._checksum_dtype is None:
            return
        matched = evidence.matched if evidence is not None else ()
        self._trusted_names = (self._trusted_names or set()) | set(matched)
