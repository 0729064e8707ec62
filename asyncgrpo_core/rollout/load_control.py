"""How many rollouts the server can take: a cap that follows its KV cache (reference, 'vLLM load').

A pure state machine: no I/O, no clock.
"""

from __future__ import annotations

from asyncgrpo_core.server.load import LoadSample

POLL_EVERY_S = 5.0
_RAISE_BELOW = 0.60
_LOWER_ABOVE = 0.80
_RAISE_FACTOR = 1.25
_LOWER_FACTOR = 0.70


class ConcurrencyCap:
    """The live limit on rollouts in flight.

    It starts at KV-cache tokens / max_model_len, the requests that fit at full length. While the KV cache is used
    below 60 % and no request waits it goes up by 25 %, at most once per cap's worth of finished rollouts; above 80 %
    it goes down by 30 %. It stays between 1 and `ceiling`. Without a reading it is the ceiling.

    Args:
        ceiling: max_concurrent_rollouts.
        max_model_len: the server's; None when unknown, then the cap starts at the ceiling.
    """

    def __init__(self, ceiling: int, max_model_len: int | None) -> None:
        self.ceiling = ceiling
        self.value = ceiling
        self._max_model_len = max_model_len
        self._started = False
        self._finished_since_raise = 0

    def rollout_finished(self) -> None:
        self._finished_since_raise += 1

    def observe(self, load: LoadSample | None) -> int:
        """Take one reading (None: the server has no /metrics) and return the cap."""
        if load is None or load.kv_cache_usage is None:
            if not self._started:
                self.value = self.ceiling
            return self.value
        if not self._started:
            self._started = True
            if load.kv_cache_tokens and self._max_model_len:
                self._set(load.kv_cache_tokens // self._max_model_len)
            return self.value
        if load.kv_cache_usage > _LOWER_ABOVE:
            self._set(int(self.value * _LOWER_FACTOR))
            self._finished_since_raise = 0
        elif load.kv_cache_usage < _RAISE_BELOW and not load.waiting and self._finished_since_raise >= self.value:
            self._set(max(self.value + 1, int(self.value * _RAISE_FACTOR)))
            self._finished_since_raise = 0
        return self.value

    def _set(self, value: int) -> None:
        self.value = min(self.ceiling, max(1, value))
