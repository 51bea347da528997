"""Loaded kernels are identical to the kernels that were compiled."""

import multiprocessing
import threading

import msgspec
import pytest
import torch
from llvmlite import binding as llvm
from numba import njit

from homing.replica.kernels.cpu.linear.product import compiled as product
from homing.replica.kernels.cpu.linear.tile import tile
from homing.replica.kernels.cpu.pointwise import _add_rms_norm as norm
from homing.replica.kernels.cpu.pointwise import _silu_mul as activation
from homing.replica.kernels.cpu.runtime import compilation
from homing.replica.kernels.cpu.runtime.code_store import DIGEST_BYTES, CodeStore, MachineCode
from homing.replica.kernels.cpu.runtime.compilation import StoredKernel, description, key_of, load_or_compile
from homing.replica.kernels.cpu.runtime.scalars import storage_of
from homing.replica.kernels.cpu.runtime.thread_team import run
from homing.replica.kernels.cpu.runtime.vectors import NATIVE, WIDENED

BFLOAT16, FLOAT32 = storage_of(torch.bfloat16), storage_of(torch.float32)


@pytest.fixture(autouse=True)
def _without_the_store_of_the_run(monkeypatch):
    """Make these tests compile their kernels even if the run has a folder of compiled ones."""
    monkeypatch.setattr(compilation, "store", lambda: None)


def source_of(make, *arguments):
    """The Python function of a kernel, bypassing the cache of compiled kernels."""
    return make.__wrapped__(*arguments).__wrapped__


def silu_of(kernel, gate_up):
    """The output of an activation kernel run by two threads."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    run(kernel, (gate_up, out), (len(gate_up), out.shape[1], gate_up.stride(0)), 2)
    return out


def test_kept_code_answers_as_the_compiled_one(tmp_path):
    """Bit for bit, including calls into OpenMP; otherwise answers would depend on which process compiled."""
    store, source, x = CodeStore(tmp_path), source_of(activation, FLOAT32), torch.randn(5, 66)

    compiled = load_or_compile(source, store)
    kept = load_or_compile(source, store)

    assert not isinstance(compiled, StoredKernel)
    assert isinstance(kept, StoredKernel)
    assert torch.equal(silu_of(kept, x), silu_of(compiled, x))


def test_stored_code_may_use_address_0(tmp_path):
    """Otherwise LLVM drops stores whose address it has split into 0 and an offset."""
    store, source = CodeStore(tmp_path), source_of(activation, FLOAT32)

    load_or_compile(source, store)

    module = llvm.parse_bitcode(store.get(key_of(source)).bitcode)
    computed = [each for each in module.functions if "inttoptr i64" in str(each)]
    assert computed
    assert all(b"null_pointer_is_valid" in b" ".join(each.attributes) for each in computed)


def test_a_process_that_waited_uses_what_was_compiled_meanwhile(tmp_path):
    """Of two ranks that start at once, one compiles; the other looks again once it holds the lock."""
    store, source = CodeStore(tmp_path), source_of(activation, FLOAT32)
    kernels, waits = [], threading.Thread(target=lambda: kernels.append(load_or_compile(source, CodeStore(tmp_path))))

    with store.lock(key_of(source)):
        waits.start()
        fill_as_another_would(store, source)
    waits.join()

    assert isinstance(kernels[0], StoredKernel)


def fill_as_another_would(store, source):
    """Compile and store a kernel whose lock is already held."""
    unlocked = CodeStore(store.folder, lock_timeout_s=0.0)
    assert not isinstance(load_or_compile(source, unlocked), StoredKernel)


def test_kernels_that_two_processes_stored_share_no_specialized_function(tmp_path):
    """Both processes number their functions alike. A linker that mixed up functions of two kernels caused NaN."""
    store = CodeStore(tmp_path)
    for source in [source_of(norm, storage, True) for storage in (FLOAT32, BFLOAT16)]:
        process = multiprocessing.get_context("fork").Process(target=load_or_compile, args=(source, store))
        process.start()
        process.join()

    first, second = (exported(file.read_bytes()) for file in tmp_path.glob("*.kernel"))

    assert any("locals" in name for name in first)
    assert not [name for name in first & second if "locals" in name]


def exported(content):
    """Functions that the linker could also use for other kernels."""
    code = msgspec.msgpack.decode(content[DIGEST_BYTES:], type=MachineCode)
    functions = llvm.parse_bitcode(code.bitcode).functions
    return {
        each.name for each in functions if not each.is_declaration and each.linkage.name not in ("internal", "private")
    }


def test_without_a_store_kernels_are_compiled():
    """For example, when the folder is not trusted."""
    assert not isinstance(load_or_compile(source_of(activation, FLOAT32), None), StoredKernel)


def test_a_description_distinguishes_all_that_a_kernel_is_made_for():
    """One source gives a different kernel for each dtype and each value that it closes over."""
    norms = [source_of(norm, *which) for which in ((BFLOAT16, True), (BFLOAT16, False), (FLOAT32, True))]
    sources = [*norms, source_of(activation, FLOAT32), source_of(product, WIDENED)]

    words = {description(source) for source in sources} | {description(tile(NATIVE, prefetches=False))}

    assert len(words) == len(sources) + 1
    assert "0x" not in "".join(words)


def test_what_cannot_be_described_is_refused():
    """Otherwise the description would omit the value, and code for another value would be loaded."""
    with pytest.raises(TypeError, match="cannot be described"):
        description(object())


def test_helpers_from_elsewhere_are_refused():
    """Their source is not in the fingerprint, so code compiled from an old version would be loaded."""
    elsewhere = njit(lambda x: x)

    with pytest.raises(AssertionError, match="not among the kernels"):
        description(elsewhere)
