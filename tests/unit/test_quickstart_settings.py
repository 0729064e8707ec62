"""The quickstart's config file runs the settings that were measured (issue 1, point 2)."""

from dataclasses import MISSING, fields
from importlib import resources

import pytest
import yaml

from asyncgrpo_core.quickstart.settings import TRAINING
from asyncgrpo_core.training.config import AsyncGRPOConfig


@pytest.fixture(scope="module")
def config():
    return yaml.safe_load((resources.files("asyncgrpo_core.launch") / "quickstart.yaml").read_text())


@pytest.mark.parametrize("name", sorted(TRAINING))
def test_the_embedded_config_has_the_measured_value(config, name):
    written = {**config["sampling"], **config["training"], **config["server"]}
    defaults = {field.name: field.default for field in fields(AsyncGRPOConfig) if field.default is not MISSING}
    assert name in written or name in defaults, f"{name} is set nowhere"
    assert written.get(name, defaults.get(name)) == TRAINING[name]
