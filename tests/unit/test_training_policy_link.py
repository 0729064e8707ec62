"""What the pipeline is told about the policy."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from asyncgrpo_core.training.policy_link import policy_link
from tests.unit.policy_cases import _SHAPE
from tests.unit.test_models_loading import tokenizer


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),
    ],
)
def test_the_pipeline_knows_how_long_samples_may_be(rope, longest):
    """Servers that are set up for longer ones are refused (test_server_checks.py)."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**_SHAPE, rope_parameters=rope))
    trainer = SimpleNamespace(
        model=model,
        train_dataset=None,
        accelerator=SimpleNamespace(unwrap_model=lambda m: m),
        ranks=SimpleNamespace(on=lambda *_: None),
        args=SimpleNamespace(device=torch.device("cpu")),
        processing_class=tokenizer(eos_token="</s>", pad_token="<pad>"),
    )
    link = policy_link(trainer)
    assert link.longest_sample == longest
    assert (link.dtype, link.device, link.adapter) == ("float32", "cpu", None)
    assert link.row_cost.hidden_size == _SHAPE["hidden_size"]
