import jax
import pytest

from kernels.cpu import library

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session")
def best_instruction_set() -> str:
    library.load()
    return library.instruction_set()


@pytest.fixture(params=["avx512_bf16", "avx512", "avx2", "generic"])
def instruction_set(request, best_instruction_set):
    """Each instruction set in turn; one that this machine lacks is replaced by its best."""
    try:
        library.use_instruction_set(request.param)
    except ValueError:
        library.use_instruction_set(best_instruction_set)
    yield library.instruction_set()
    library.use_instruction_set(best_instruction_set)
