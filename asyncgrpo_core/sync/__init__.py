"""Weight sync: how the trained policy reaches the vLLM server, and how delivery is proved.

    Publisher.publish(version)
        backend.prepare -> pause -> barrier -> backend.transfer -> resume -> canary (+ tensors) -> verdict
        publisher.py      server/control.py     shm.py nccl.py ipc.py        canary.py checksums.py

`vllm_plugin.py`, `shm_engine.py` and `worker_extension.py` run inside the server. This package is the only importer of
vllm.
"""
