"""What every engine is given, made once: the built-in target and a drafter of each method (see engine_cases.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_homes import is_ready, llama_cpp_home, vllm_home

from benchmarks.engine_cases import OWN_MODULE, EngineCases
from benchmarks.engine_glm import write_glm
from benchmarks.speculators_environment import environment


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> EngineCases:
    """The built-in target with 24 test prompts."""
    return EngineCases(tmp_path_factory.mktemp("engines") / "builtin")


@pytest.fixture(scope="session")
def glm(cases: EngineCases, tmp_path_factory: pytest.TempPathFactory) -> EngineCases:
    """The same target as GLM-4.5 stores one, with a multi-token-prediction module of its own."""
    folder = tmp_path_factory.mktemp("glm")
    model = write_glm(cases.target_folder, folder / "model")
    settings = {"mtp": OWN_MODULE}
    return EngineCases(folder / "cases", model=str(model), num_prompts=12, num_train=48, settings=settings)


@pytest.fixture(scope="session")
def vllm_ready() -> Path:
    """vLLM's environment; skips where it is not built."""
    if not is_ready(vllm_home()):
        pytest.skip(f"no vLLM in {vllm_home()}: run tests/engines/install_vllm.py")
    return vllm_home()


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """llama.cpp's folder; skips where it is not built."""
    if not is_ready(llama_cpp_home()):
        pytest.skip(f"no llama.cpp in {llama_cpp_home()}: run tests/engines/install_llama_cpp.py")
    return llama_cpp_home()


@pytest.fixture(scope="session")
def speculators_ready() -> Path:
    """speculators' environment; skips where it is not there."""
    if not (environment() / "bin" / "python").exists():
        pytest.skip(f"no speculators in {environment()}: run python -m benchmarks.speculators_environment")
    return environment()
