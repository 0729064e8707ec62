"""Load safetensors files into vLLM's own model classes: `python -m tests.integration.vllm_load REPORT FOLDER...`.

Every FOLDER has a config, a tokenizer and `sent.safetensors`. All parameters and saved buffers of the model are NaN
before the file is loaded, so what is NaN afterwards was not sent. REPORT gets, by folder name,
{"class", "left", "error", "digests", "fingerprints"}: the last two are of the weights as they are loaded in bfloat16,
made by vLLM and by our worker extension. A server has them where its kernels take weights as they are (a CPU server's
do not).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm.utils.torch_utils import set_default_torch_dtype

from asyncgrpo_core.sync.worker_extension import model_fingerprints


@torch.no_grad()
def load(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = {"class": None, "left": None, "error": None, "digests": None, "fingerprints": None}
    options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "enforce_eager": True, "max_model_len": 128}
    config = EngineArgs(model=str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
            init_distributed_environment(
                world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=rendezvous
            )
            initialize_model_parallel(1, 1)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        report["class"] = type(model).__name__
        # vLLM's attention has scales of its own ("_k_scale"), which no checkpoint of such a model holds.
        held = {
            n: t
            for n, t in model.state_dict().items()
            if t.is_floating_point() and not n.rpartition(".")[2].startswith("_")
        }
        for tensor in held.values():
            tensor.fill_(float("nan"))
        try:
            model.load_weights(iter(load_file(folder / "sent.safetensors").items()))
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
        report["digests"] = compute_tensor_digests(model)
        report["fingerprints"] = model_fingerprints(model)
        report["left"] = [name for name, tensor in held.items() if tensor.isnan().any()]
    return report


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    found = {folder: load(Path(folder)) for folder in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps({Path(folder).name: report for folder, report in found.items()}))
