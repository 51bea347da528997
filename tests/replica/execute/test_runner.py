"""The runner uses the requested device and threads, returns the planned logits, and keeps KV across steps."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from homing.replica.attention.paged import PagedAttention
from homing.replica.config import ReplicaSettings
from homing.replica.engine.step_plan import BlockCopy, PlanRow, plan_of_rows
from homing.replica.errors import StartupError
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner, capability_problem, resolve_device
from homing.replica.models.loading import TORCH_DTYPES

from ..toys import BLOCK_SIZE, ToyScheduler, make_runner


def test_logits_stand_where_the_plan_wants_them(checkpoint):
    """Logits come in the plan's order, also for tokens inside a row (prompt logprobs) and rows out of order."""
    runner = make_runner(checkpoint("llama"))
    rows = [PlanRow([5, 6, 7], 0, [1]), PlanRow([9, 8], 0, [2])]

    every = runner.forward(plan_of_rows(0, rows, logits_at=range(5)))
    some = runner.forward(plan_of_rows(1, rows, logits_at=[4, 1]))

    torch.testing.assert_close(some, every[[4, 1]])
    assert every.dtype == torch.float32


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_step_without_logits_still_writes_kv(provider, checkpoint):
    """The first chunk of a long prompt wants no logits, but the next chunk needs its KV."""
    runner = make_runner(checkpoint("llama"), provider)
    ids = list(range(3, 16))

    whole = runner.forward(plan_of_rows(0, [PlanRow(ids, 0, [1, 2])]))
    nothing = runner.forward(plan_of_rows(1, [PlanRow(ids[:9], 0, [3, 4])], logits_at=[]))
    rest = runner.forward(plan_of_rows(2, [PlanRow(ids[9:], 9, [3, 4])]))

    assert nothing.shape == (0, 211)
    torch.testing.assert_close(rest, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_copied_kv_is_as_good_as_computed_kv(provider, checkpoint):
    """A prompt that diverges inside a block continues from the copy."""
    runner = make_runner(checkpoint("llama"), provider)
    shared, own = list(range(3, 16)), [20, 21, 22]
    whole = runner.forward(plan_of_rows(0, [PlanRow(shared + own, 0, [1, 2])]))
    runner.forward(plan_of_rows(1, [PlanRow([*shared, 99, 98], 0, [3, 4])]))
    rest = PlanRow(own, 13, [3, 5])

    copied = runner.forward(plan_of_rows(2, [rest], copies=[BlockCopy(4, 5, 5)]))
    not_copied = runner.forward(plan_of_rows(3, [PlanRow(own, 13, [3, 6])]))

    torch.testing.assert_close(copied, whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(not_copied, whole, rtol=1e-4, atol=1e-4)


def test_copies_of_a_step_are_read_before_any_is_written(checkpoint):
    """One request's source block may be another's target within the same step."""
    runner = make_runner(checkpoint("llama"))
    prompts = [list(range(3, 11)), list(range(30, 38))]
    computed = [PlanRow(prompt, 0, [block]) for prompt, block in zip(prompts, (1, 2), strict=True)]
    runner.forward(plan_of_rows(0, computed))
    swapped = [PlanRow(prompt[6:], 6, [block]) for prompt, block in zip(prompts, (2, 1), strict=True)]

    logits = runner.forward(plan_of_rows(1, swapped, copies=[BlockCopy(1, 2, 6), BlockCopy(2, 1, 6)]))

    fresh = runner.forward(plan_of_rows(2, [PlanRow(prompt, 0, [9 + i]) for i, prompt in enumerate(prompts)]))
    torch.testing.assert_close(logits, fresh, rtol=1e-4, atol=1e-4)


def test_blocks_of_one_request_do_not_leak_into_another(checkpoint, prompts):
    """Answers in a used pool equal answers in a fresh one: slots beyond a row's end are masked."""
    used = make_runner(checkpoint("llama"))
    ToyScheduler(used.forward, chunk=16, reuse=False).generate(prompts, 8)

    again = ToyScheduler(used.forward, chunk=5, reuse=False).generate(prompts[::-1], 8)

    fresh = ToyScheduler(make_runner(checkpoint("llama")).forward, chunk=16).generate(prompts[::-1], 8)
    assert again == fresh


def test_recomputed_request_goes_on_as_before(checkpoint, reference):
    """After preemption, prefilling the prompt and the generated tokens gives the same next tokens."""
    folder = checkpoint("qwen3", head_dim=32)
    prompt = list(range(3, 30))
    answer = ToyScheduler(make_runner(folder).forward, chunk=7).generate([prompt], 9)[0]

    resumed = ToyScheduler(make_runner(folder).forward, chunk=7).generate([prompt + answer[:4]], 5)[0]

    assert resumed == answer[4:]


def test_a_token_beyond_the_vocabulary_is_refused(checkpoint):
    """A drafter might produce such an id, and kernels would read beyond the embedding."""
    runner = make_runner(checkpoint("llama"))
    vocabulary = runner.spec.vocab_size

    with pytest.raises(AssertionError, match=f"token id {vocabulary}, a vocabulary of {vocabulary}"):
        runner.forward(plan_of_rows(0, [PlanRow([3, vocabulary], 0, [1])]))


@pytest.mark.parametrize("provider", ["native", "transformers"])
@pytest.mark.parametrize("kind", [ModelRunner, GpuRunner])
def test_a_row_may_ask_for_several_tokens_of_an_answer(kind, provider, checkpoint):
    """For drafts: each draft token gets its logits, and a rejected one has no lasting effect."""
    settings = ReplicaSettings(dtype="float32", device="cpu", model_provider=provider, max_model_len=64)
    runner = kind(settings, checkpoint("llama"), BLOCK_SIZE)
    runner.allocate_kv(10)
    prompt, answer, other = list(range(3, 16)), [20, 21, 22, 23], [40, 41]
    neighbour = PlanRow([5], 0, [9])
    one_by_one = []
    for at, row in enumerate([prompt, *([token] for token in answer)]):
        start = len(prompt) + at - 1 if at else 0
        one_by_one.append(runner.forward(plan_of_rows(at, [PlanRow(row, start, [1, 2, 3])]))[0])

    runner.forward(plan_of_rows(10, [PlanRow(prompt, 0, [4, 5, 6])]))
    guessed = PlanRow([answer[0], *other], 13, [4, 5, 6])
    guesses = runner.forward(plan_of_rows(11, [neighbour, guessed], logits_at=[1, 2, 3]))
    corrected = runner.forward(plan_of_rows(12, [PlanRow(answer[1:], 14, [4, 5, 6])], logits_at=[0, 1, 2]))

    torch.testing.assert_close(guesses[0], one_by_one[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(corrected, torch.stack(one_by_one[2:]), rtol=1e-4, atol=1e-4)


#: Norm of the error over a prompt's logits relative to the logits' norm, as stated in docs/models.md. Measured over the
#: models below and both providers: at most 0.0088 and 0.0011, as transformers' own error.
BOUNDS = {"bfloat16": 0.015, "float16": 0.002}
#: All experts for every token: between nearly equal experts rounding decides, and the error would measure that choice.
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
HALVED = {
    "llama": ("llama", {}),
    "llama, sizes that fill no block of a kernel": (
        "llama",
        {"hidden_size": 72, "head_dim": 10, "intermediate_size": 90},
    ),
    "mistral": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 16}),
}


@pytest.mark.parametrize("provider", ["native", "transformers"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("model_type", "overrides"), HALVED.values(), ids=HALVED)
def test_half_precision_stays_within_its_bounds(model_type, overrides, dtype, provider, checkpoint):
    """Chunked, over the cache. Logits are returned as float32, with an error at most 1.5 times transformers'."""
    folder = checkpoint(model_type, **overrides)
    ids = torch.randint(3, 200, (70,), generator=torch.Generator().manual_seed(4)).tolist()
    half = ModelRunner(ReplicaSettings(dtype=dtype, device="cpu", model_provider=provider), folder, BLOCK_SIZE)
    half.allocate_kv(10)

    ours, exact = (all_logits(runner, ids) for runner in (half, make_runner(folder, provider)))

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype], attn_implementation="eager")
    with torch.inference_mode():
        error = distance(theirs(torch.tensor([ids])).logits[0].float(), exact)
    assert ours.dtype == torch.float32
    assert half.spec.dtype == dtype
    assert distance(ours, exact) <= min(BOUNDS[dtype], 1.5 * error)


def test_bounds_of_half_precision_are_those_that_the_page_states():
    """Users must be able to look up the bounds."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()

    assert [dtype for dtype, bound in BOUNDS.items() if f"| {dtype} | {100 * bound:.1f} % |" not in page] == []


def all_logits(runner, ids):
    """Logits of every position, computed in chunks of 9."""
    parts = []
    for start in range(0, len(ids), 9):
        chunk = ids[start : start + 9]
        plan = plan_of_rows(0, [PlanRow(chunk, start, list(range(1, 10)))], logits_at=range(len(chunk)))
        parts.append(runner.forward(plan))
    return torch.cat(parts)


def distance(logits, exact):
    return float((logits - exact).norm() / exact.norm())


def test_kernels_that_depend_on_a_prompt_s_length_are_compiled_before_ready(checkpoint, monkeypatch):
    """The backend lists lengths that need all its kernels; those beyond the model's positions are skipped."""
    lengths = []
    monkeypatch.setattr(PagedAttention, "kernel_lengths", (2, 8, 1 << 20))
    monkeypatch.setattr(ModelRunner, "forward", lambda self, plan: lengths.append(plan.q_lens))

    make_runner(checkpoint("llama"))

    assert lengths == [[2], [8]]


def test_forward_before_kv_is_a_broken_promise(checkpoint):
    """The engine must size the pool from the model's spec first."""
    runner = ModelRunner(ReplicaSettings(device="cpu"), checkpoint("llama"), BLOCK_SIZE)

    with pytest.raises(AssertionError, match="allocate_kv"):
        runner.forward(plan_of_rows(0, [PlanRow([5], 0, [1])]))


@pytest.mark.parametrize(("capability", "usable"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_gpu_that_cannot_multiply_bfloat16_is_refused(capability, usable):
    """Otherwise Triton would end the start with a compiler error."""
    problem = capability_problem(capability)

    assert problem is None if usable else "compute capability 7.5, but homing needs 8.0" in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_cuda_is_refused_by_name():
    """A silent fallback would serve at a hundredth of the speed."""
    with pytest.raises(StartupError, match=r"torch cannot use it: .*docs/gpu\.md"):
        resolve_device(ReplicaSettings(device="cuda"))


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_kv_in_8_bits_is_near_for_any_schedule(provider, checkpoint, prompts):
    """Plain torch on a CPU: half of bfloat16's memory; every read, also within a chunk, gets the stored value."""
    plan = plan_of_rows(0, [PlanRow(list(range(3, 60)), 0, list(range(1, 9)))])
    exact = make_runner(checkpoint("llama"), provider).forward(plan)
    runner = make_runner(checkpoint("llama"), provider, kv_cache_dtype="fp8")

    found = runner.forward(plan)

    assert runner.pool.keys[0].dtype == runner.pool.values[1].dtype == torch.float8_e4m3fn
    assert runner.spec.bytes_per_block(BLOCK_SIZE) == BLOCK_SIZE * 2 * 2 * (16 + 16)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05
    whole, chunks = (ToyScheduler(runner.forward, chunk, reuse) for chunk, reuse in ((64, False), (7, True)))
    assert whole.generate(prompts, 6) == chunks.generate(prompts, 6)
    assert chunks.hit_tokens


def test_copied_kv_in_8_bits_is_as_good_as_computed_kv(checkpoint):
    """A copy moves bits without converting them."""
    runner = make_runner(checkpoint("llama"), kv_cache_dtype="fp8")
    shared, own = list(range(3, 16)), [20, 21, 22]
    whole = runner.forward(plan_of_rows(0, [PlanRow(shared + own, 0, [1, 2])]))

    copied = runner.forward(plan_of_rows(1, [PlanRow(own, 13, [1, 5])], copies=[BlockCopy(2, 5, 5)]))

    torch.testing.assert_close(copied, whole, rtol=1e-4, atol=1e-4)


def test_kv_in_8_bits_that_the_device_cannot_read_is_refused(checkpoint, monkeypatch):
    """The refusal precedes allocating the pool and names the setting to change."""
    monkeypatch.setattr(
        "homing.replica.execute.runner.fp8_kv_problem", lambda capability, dtype: f"{capability} {dtype}"
    )

    with pytest.raises(StartupError, match="kv_cache_dtype: fp8 cannot be used: None float32; use auto"):
        make_runner(checkpoint("llama"), kv_cache_dtype="fp8")
