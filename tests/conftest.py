"""What several test files share."""

import shutil
from pathlib import Path

import pytest

from tfm.engine.default_model import SMOLLM2_135M, ensure_default_model, fetch_gguf
from tfm.engine.store import building, models_folder


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The default model as users get it, in the user's own cache: made by the first test run, found by the next."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def default_model_gguf(default_model_folder: Path) -> Path:
    """The GGUF file that the default model was imported from, kept beside it for comparison."""
    name = "tests-smollm2-135m-gguf"
    with building(name) as staging:
        if staging is not None:
            (staging / "model").mkdir()
            shutil.move(fetch_gguf(SMOLLM2_135M, staging), staging / "model" / SMOLLM2_135M.gguf)
    return models_folder() / name / SMOLLM2_135M.gguf
