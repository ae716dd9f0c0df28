"""What several test files share."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parrot import write_parrot

from tfm.cli import interrupt
from tfm.cli.main import WRONG_USAGE, _invoke
from tfm.cli.output import Output
from tfm.engine import load
from tfm.engine.constraint import Constraints
from tfm.engine.default_model import SMOLLM2_135M, ensure_default_model, fetch_gguf
from tfm.engine.store import building, models_folder
from tfm.engine.tokenizer import Tokenizer

# Workers run beside each other (-n 2): a thread each for NumPy's BLAS, as in tfm's own processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Every process that is started here would compile tfm's modules anew, which is a fifth of what a start takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# In the background of a script SIGINT and SIGQUIT are ignored, and processes started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With -n: a worker that has nothing left takes half of what another has, instead of pairs of tests to the end.

    So each has whole files for the most part, whose fixtures are made once, and neither works alone at the end.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


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


@pytest.fixture(scope="module")
def big(default_model_folder: Path) -> Tokenizer:
    """The default model's tokenizer, beside the small ones that tests write."""
    return Tokenizer.load(default_model_folder)


@pytest.fixture(scope="module")
def constraints(big: Tokenizer) -> Constraints:
    """On the default model's vocabulary, as a model has it that has a few rows more."""
    return Constraints(big, big.vocab_size + 7)


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that after a line feed says "Hi é🙂!", whose characters of several bytes are as many tokens.

    It has been loaded once, so that the kernels are compiled and no command has to say that it compiles them.
    """
    folder = write_parrot(tmp_path_factory.mktemp("parrot"), "Hi é🙂!".encode())
    load(folder).close()
    return folder


@pytest.fixture(scope="session")
def chatty_parrot(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    return write_parrot(tmp_path_factory.mktemp("chatty-parrot"), "Hi é🙂!".encode(), chat=True)


@pytest.fixture(scope="session")
def endless_chat(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for chats that answers without end."""
    return write_parrot(tmp_path_factory.mktemp("endless-chat"), b"abcdefghij", loop=True, chat=True, context=1_000_000)


@pytest.fixture(scope="session")
def small_chat(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for chats with a context of 128 tokens, which are bytes."""
    return write_parrot(tmp_path_factory.mktemp("small-chat"), "Hi é🙂!".encode(), chat=True, context=128)


@pytest.fixture(scope="session")
def endless_parrot(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that after a line feed says abcdefghijabcdefghij... until its context of a million tokens is full."""
    return write_parrot(tmp_path_factory.mktemp("endless"), b"abcdefghij", loop=True, context=1_000_000)


@pytest.fixture
def stop() -> Iterator[None]:
    """Ctrl-C is what it is in tfm: an exception between two of Python's instructions."""
    before = signal.signal(signal.SIGINT, interrupt.Stop())
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def wrong_usage(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command line that is wrong usage is told, and nothing on stdout.

    It is run within this process: a start for each of so many would tell the same.
    """

    def told(*arguments: str) -> str:
        status = _invoke(list(arguments), Output())
        out, error = capfd.readouterr()
        assert (status, out) == (WRONG_USAGE, "")
        return error

    return told


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the history of a test's chat is kept."""
    return tmp_path / "data"
