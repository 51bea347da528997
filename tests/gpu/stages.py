"""The stages of the GPU check: each takes a setup and yields figures, or raises Skipped if it lacks something."""

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from check import FURTHER, missing
from models import MAX_POSITIONS, random_runner, sizes
from torch.nn.functional import scaled_mm

from homing.kvcache.hashing import BlockHash, BlockHasher, join_hashes, token_bytes
from homing.kvcache.prefix_cache import PrefixCache
from homing.replica.config import ReplicaSettings
from homing.replica.engine.engine import Engine
from homing.replica.engine.overlapped import OverlappedEngine
from homing.replica.engine.scheduler import SchedulerLimits
from homing.replica.engine.step_plan import PlanRow, SlotStart, StepPlan, plan_of_rows
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.execute.cuda_graphs import EagerSteps
from homing.replica.execute.gpu_runner import GpuRunner
from homing.replica.execute.runner import ModelRunner
from homing.replica.kernels.choice import choose_kernels
from homing.replica.messages import Generate, SamplingParams
from homing.replica.models.fp8 import FP8_DTYPE, ScaledLinears, ScaledWeight

Runner = TypeVar("Runner", bound=ModelRunner)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True, frozen=True)
class Setup:
    """The device that the stages run on, and whether shapes are tiny."""

    device: torch.device
    tiny: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def memory_bytes(self) -> float:
        """The device's memory; infinite on a CPU, where shapes are tiny."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.cuda else float("inf")

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(slots=True, frozen=True)
class Figure:
    """One result. `met` says whether its goal or requirement is met; None if it has neither."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    met: bool | None = None
    speed: bool = False  #: whether it is a goal of speed, of which correctness does not depend


def of_ceiling(name: str, share: float, goal: float | None) -> Figure:
    """A rate as a share of what the device was measured to reach, so that goals hold for any GPU."""
    return Figure(name, share, "share", goal, None if goal is None else share >= goal, speed=True)


class Skipped(Exception):  # noqa: N818
    """A stage cannot run here; the message says what is missing."""


def seconds(setup: Setup, run: Callable[[], object], repeats: int) -> float:
    """Mean seconds per run over `repeats` runs, after two warm-up runs."""
    for _ in range(2):
        run()
    setup.wait()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    setup.wait()
    return (time.perf_counter() - started) / repeats


def most_tokens(name: str, memory_bytes: float) -> float:
    """Tokens of KV that fit next to a shape's weights, with a tenth and 4 GB left for steps, graphs and logits."""
    free = 0.9 * memory_bytes - 4e9 - sizes(name).weight_bytes
    return free / sizes(name).kv_bytes_per_token


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton compiles while the context is open; empty if Triton is not installed."""
    found: list[str] = []
    if find_spec("triton") is None:
        yield found
        return
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *_, **about: found.append(str(about.get("repr", "a kernel")))
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


# --- (a) ceilings ---


def ceilings(setup: Setup) -> list[Figure]:
    """The machine's limits: reading, copying, multiplying, launching."""
    small = torch.zeros(16, device=setup.device)
    return [
        Figure("copy", _copy_rate(setup) / 1e12, "TB/s"),
        Figure("read", read_rate(setup) / 1e12, "TB/s"),
        Figure("matmul bfloat16", product_rate(setup) / 1e12, "TFLOP/s"),
        Figure("eager launch", seconds(setup, lambda: small.add_(1), 1000) * 1e6, "us"),
        *_graph_launch(setup, small),
    ]


def read_rate(setup: Setup) -> float:
    """Bytes per second of reading memory once."""
    words = _gigabytes(setup)
    return words.nbytes / seconds(setup, lambda: words.amax(), 10)


def _copy_rate(setup: Setup) -> float:
    source = _gigabytes(setup)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(setup, lambda: target.copy_(source), 10)


def product_rate(setup: Setup) -> float:
    """FLOP per second of a large product in bfloat16."""
    edge = 64 if setup.tiny else 8192
    left, right = (torch.randn(edge, edge, device=setup.device).bfloat16() for _ in range(2))
    return 2 * edge**3 / seconds(setup, lambda: left @ right, 10)


def _gigabytes(setup: Setup) -> torch.Tensor:
    return torch.ones(1 << (14 if setup.tiny else 30), dtype=torch.int32, device=setup.device)


def _graph_launch(setup: Setup, small: torch.Tensor) -> list[Figure]:
    if not setup.cuda:
        return []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            small.add_(1)
    return [Figure("graph node", seconds(setup, graph.replay, 10) * 1e3, "us")]


# --- (b) correctness ---


def kernels(setup: Setup) -> list[Figure]:
    """The kernels' own tests on this device: against float64, with poisoned memory and padding rows."""
    _require("kernels")
    folder = ROOT / "tests" / "replica" / "kernels"
    chosen = folder / "triton" / "test_activation.py" if setup.tiny else folder
    # Without plugins and without the project's settings and conftest, which need more packages.
    flags = ["-q", "-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", str(folder)]
    flags += ["--import-mode=importlib", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None and not setup.tiny:  # most of the time is compilation, one core each
        flags += ["-p", "xdist", "-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, str(chosen)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    return [Figure("kernel tests", float(done.returncode == 0), "passed", met=done.returncode == 0)]


def steps(setup: Setup) -> Iterator[Figure]:
    """Tokens must be equal: graphs and eager steps, cached and computed prefixes, launched ahead and one by one."""
    for provider in ("native", "transformers"):
        folder = _toy_checkpoint()
        plain = _answers(Engine, _toy(ModelRunner, folder, provider, setup), cached=True)
        variants = {
            "overlapped = plain": _answers(OverlappedEngine, _toy(GpuRunner, folder, provider, setup), True),
            "graph = eager": _answers(OverlappedEngine, _toy(_EagerRunner, folder, provider, setup), True),
            "cached = uncached": _answers(Engine, _toy(ModelRunner, folder, provider, setup), cached=False),
        }
        for name, answers in variants.items():
            same = sum(answers[number] == plain[number] for number in plain)
            yield Figure(f"{provider}: {name}", same, f"of {len(plain)} answers", met=same == len(plain))
        yield _graph_bits(provider, partial(_toy, GpuRunner, folder, provider, setup))
    shape = "tiny" if setup.tiny else "Qwen3-0.6B"
    limits = {"max_running_requests": 8, "max_model_len": 128}
    yield _graph_bits(shape, partial(random_runner, shape, setup.device, 40, 16, **limits))


class _EagerRunner(GpuRunner):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, graphs=EagerSteps())


def _toy_checkpoint() -> Path:
    sys.path.insert(0, str(ROOT / "tests" / "replica"))
    from toys import save_checkpoint

    return save_checkpoint(Path(tempfile.mkdtemp()), "qwen3", head_dim=64)


def _toy(kind: type[Runner], folder: Path, provider: Any, setup: Setup) -> Runner:
    device: Any = "cuda" if setup.cuda else "cpu"
    settings = ReplicaSettings(
        dtype="float32", device=device, model_provider=provider, max_running_requests=6, max_model_len=200
    )
    runner = kind(settings, folder, 16)
    runner.allocate_kv(40)
    return runner


#: A step with a penalty can draw only when the host knows the previous tokens.
SAMPLING: tuple[dict[str, float], ...] = ({}, {"top_p": 0.9}, {"frequency_penalty": 0.7})


def _answers(kind: type[Engine], runner: ModelRunner, cached: bool) -> dict[int, list[int]]:
    random = Random(3)
    shared = [random.randrange(3, 200) for _ in range(40)]
    prompts = [shared[: random.randrange(40)] + [random.randrange(3, 200) for _ in range(9)] for _ in range(8)]
    engine, hasher = _engine(kind, runner, blocks=39, budget=48, running=6, cached=cached)
    requests = [
        _request(number, prompt, hasher, 12, temperature=(0.0, 0.8)[number % 2], seed=number, **SAMPLING[number % 3])
        for number, prompt in enumerate(prompts)
    ]
    return _run(engine, requests)


def _graph_bits(name: str, made: Callable[[], GpuRunner]) -> Figure:
    """The same decode steps of one model from graphs and eagerly; their tokens and KV must be equal bit by bit."""
    pools = []
    for graphs in (None, EagerSteps()):
        runner = made()
        if graphs is not None:
            assert runner._state is not None
            for size in runner._sizes:
                graphs.capture(("compute", size), partial(runner._state.decode.compute, size))
                graphs.capture(("draw", size), partial(runner._state.decode.draw, size))
            runner._graphs = graphs
        tokens = [runner.launch(plan).tokens() for plan in _decode_plans(rows=5, context=40, block_size=16, steps=4)]
        assert runner.pool is not None
        pools.append((tokens, [tensor.clone() for tensor in (*runner.pool.keys, *runner.pool.values)]))
    (tokens, left), (others, right) = pools
    same = tokens == others and all(torch.equal(a[1:], b[1:]) for a, b in zip(left, right, strict=True))
    return Figure(f"{name}: graph = eager, bitwise", float(same), "equal", met=same)


# --- (c) speed ---


def decode(setup: Setup) -> Iterator[Figure]:
    """Decode throughput at points of the roofline, and the time to read weights and KV as a share of the step."""
    read = read_rate(setup)
    for name, points, goal in decode_points(setup.tiny, setup.memory_bytes):
        most = max(rows * (context + 64) for rows, context in points)
        runner = random_runner(
            name, setup.device, most // 64 + 600, 64, max_running_requests=max(rows for rows, _ in points)
        )
        for rows, context in points:
            step_s = _decode_seconds(setup, runner, rows, context)
            share = sizes(name).decode_bytes(rows * context) / read / step_s
            wanted = goal if rows >= 64 else None
            label = f"{name} decode {rows} x {context}"
            yield Figure(label, rows / step_s, "tok/s")
            yield of_ceiling(f"{label}, of the roof", share, wanted)
        del runner
        _free(setup)


def decode_points(tiny: bool, memory_bytes: float) -> list[tuple[str, list[tuple[int, int]], float]]:
    """Shapes, their (rows, context) points and the goal; rows are limited to what fits in the device's memory."""
    if tiny:
        return [("tiny", [(1, 64), (3, 64)], 0.0)]
    points = [(1, 1024), (1, 4096), (64, 1024), (64, 4096), (256, 1024), (256, 4096)]
    found = []
    for name, goal in (("Qwen3-0.6B", 0.6), ("Qwen3-8B", 0.8)):
        tokens = most_tokens(name, memory_bytes) - 600 * 64
        fitting = [(min(rows, int(tokens / (context + 64)) // 16 * 16 or 1), context) for rows, context in points]
        found.append((name, list(dict.fromkeys(fitting)), goal))
    return found


def mixed(setup: Setup) -> Iterator[Figure]:
    """What slows down a decode step: a prompt's chunk in the step, top-p in the draw; also mixtures of experts."""
    name, rows, context = ("tiny", 3, 64) if setup.tiny else ("Qwen3-8B", 64, 1024)
    chunks = (8,) if setup.tiny else (64, 256, 512, 2048)
    size = 16 if setup.tiny else 64
    blocks = rows * (context + 128) // size + max(chunks) // size + 100
    runner = random_runner(name, setup.device, blocks, size, max_running_requests=rows + 1)
    plain = _decode_seconds(setup, runner, rows, context)
    yield Figure(f"{name} decode step, {rows} x {context}", plain * 1e3, "ms")
    filtered = _decode_seconds(setup, runner, rows, context, top_k=20, top_p=0.9)
    yield Figure("the same with top-k and top-p", filtered * 1e3, "ms")
    for chunk in chunks:
        plan = _mixed_plan(rows, context, chunk, size)
        took = seconds(setup, lambda plan=plan, runner=runner: runner.launch(plan), 2 if setup.tiny else 10)
        yield Figure(f"the same with a chunk of {chunk}", took * 1e3, "ms")
    del runner
    _free(setup)
    name = "tiny-experts" if setup.tiny else "Qwen3-30B-A3B/4"
    runner = random_runner(name, setup.device, blocks, size, max_running_requests=rows)
    yield Figure(f"{name} decode step, {rows} x {context}", 1e3 * _decode_seconds(setup, runner, rows, context), "ms")
    del runner
    _free(setup)


def _mixed_plan(rows: int, context: int, chunk: int, block_size: int) -> StepPlan:
    """A step that decodes `rows` rows at `context` and prefills the first `chunk` tokens of one more row."""
    (decodes,) = _decode_plans(rows, context, block_size, 1)
    per_row = -(-(context + 1) // block_size)
    table = list(range(1 + rows * per_row, 2 + rows * per_row + -(-chunk // block_size)))
    prompt = plan_of_rows(0, [PlanRow([7] * chunk, 0, table)])
    slots = [*decodes.slots, rows + 1]
    return StepPlan(
        step=0,
        token_ids=decodes.token_ids + prompt.token_ids,
        q_lens=decodes.q_lens + prompt.q_lens,
        starts=decodes.starts + prompt.starts,
        block_tables=decodes.block_tables + prompt.block_tables,
        logits_at=[*decodes.logits_at, rows + chunk - 1],
        slots=slots,
        drawn=slots,
        started=[*decodes.started, SlotStart(rows + 1, chunk, 1, 0.8, 0, 1.0, 0.0)],
    )


def reference(setup: Setup) -> Iterator[Figure]:
    """Compare logits with those of transformers' model on the same weights, in float32 and bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = _toy_checkpoint()
    prompt = [random % 200 + 3 for random in range(0, 7 * 90, 7)]
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 5e-2)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(setup.device)
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt], device=setup.device)).logits[0].float()
        device: Any = "cuda" if setup.cuda else "cpu"
        runner = ModelRunner(ReplicaSettings(dtype=dtype, device=device, max_model_len=200), folder, 16)  # type: ignore[arg-type]
        runner.allocate_kv(10)
        got = runner.forward(plan_of_rows(0, [PlanRow(prompt, 0, list(range(1, 8)))], range(len(prompt))))
        assert got is not None
        error = float((got - wanted).norm() / wanted.norm())
        yield Figure(f"{dtype}: relative error against transformers", error, "", bound, error < bound)
    yield from _products_in_8_bits(setup)


def _products_in_8_bits(setup: Setup) -> Iterator[Figure]:
    """Whether the device can multiply 8-bit weights where it should; otherwise they are dequantized."""
    capability = torch.cuda.get_device_capability(setup.device) if setup.cuda else (0, 0)
    numbers = torch.randn(512, 1024, device=setup.device).to(FP8_DTYPE)
    for kind, shape, expected in (("row", (512, 1), capability >= (8, 9)), ("block", (4, 8), capability == (9, 0))):
        linears = ScaledLinears(choose_kernels(setup.device, torch.bfloat16), torch.bfloat16, scaled_mm)
        made = linears.linear([ScaledWeight(numbers, torch.rand(shape, device=setup.device) + 0.5)], None) is not None
        yield Figure(f"products of 8 bits, scales by {kind}", made, "right", int(expected), made if expected else None)


def _decode_seconds(setup: Setup, runner: GpuRunner, rows: int, context: int, **sampling: float) -> float:
    count = 3 if setup.tiny else 30
    plans = _decode_plans(rows, context, runner.block_size, 3 + count, **sampling)
    for plan in plans[:3]:
        runner.launch(plan)
    setup.wait()
    started = time.perf_counter()
    last = None
    for plan in plans[3:]:
        last = runner.launch(plan)
    assert last is not None
    last.tokens()
    return (time.perf_counter() - started) / count


def _decode_plans(
    rows: int, context: int, block_size: int, steps: int, top_k: float = 0, top_p: float = 1.0
) -> list[StepPlan]:
    """Steps that decode rows from `context` on; their KV is whatever the pool holds."""
    per_row = -(-(context + steps) // block_size)
    tables = [list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(rows)]
    slots = list(range(1, rows + 1))
    plans = []
    for step in range(steps):
        base = plan_of_rows(step, [PlanRow([7], context + step, table) for table in tables])
        plans.append(
            StepPlan(
                step=step,
                token_ids=base.token_ids,
                q_lens=base.q_lens,
                starts=base.starts,
                block_tables=base.block_tables,
                logits_at=base.logits_at,
                slots=slots,
                drawn=slots,
                fed=list(range(rows)) if step else [],
                started=[] if step else [SlotStart(slot, 1, slot, 0.8, int(top_k), top_p, 0.0) for slot in slots],
            )
        )
    return plans


def prefill(setup: Setup) -> Iterator[Figure]:
    """Prompts of one length, one at a time, in FLOP/s of the model's own arithmetic."""
    most = product_rate(setup)
    names = ["tiny"] if setup.tiny else ["Qwen3-0.6B", "Qwen3-8B"]
    for name in names:
        lengths = [64] if setup.tiny else [1024, 4096, 32_768]
        runner = random_runner(name, setup.device, max(lengths) // 64 + 3, 64, max_running_requests=1)
        for length in lengths:
            plan = plan_of_rows(0, [PlanRow([7] * length, 0, list(range(1, length // 64 + 2)))])
            took = seconds(setup, lambda runner=runner, plan=plan: runner.forward(plan), 3)
            rate = sizes(name).prefill_flops(length) / took
            label = f"{name} prefill {length}"
            yield Figure(f"{label}, arithmetic", rate / 1e12, "TFLOP/s")
            yield of_ceiling(f"{label}, of a product's rate", rate / most, PREFILL_GOALS.get((name, length)))
            yield Figure(label, length / took, "tok/s")
        del runner
        _free(setup)


#: Least shares of a large product's rate, by shape and prompt length.
PREFILL_GOALS = {("Qwen3-8B", 4096): 0.6}
#: Least shares of `workload_rate`.
WORKLOAD_GOALS = {"Qwen3-0.6B": 0.6}


def workload_rate(name: str, lengths: Sequence[tuple[int, int]], read: float, multiply: float) -> float:
    """Most output tokens per second of requests with these prompts and answers that all start at once.

    The device only reads weights and KV (`read` bytes/s) and multiplies (`multiply` FLOP/s), whichever takes longer.
    """
    about, left = sizes(name), sorted(lengths, key=lambda each: -each[1])
    took, context = sum(about.prefill_flops(prompt) for prompt, _ in left) / multiply, sum(prompt for prompt, _ in left)
    for step in range(left[0][1]):
        while left[-1][1] <= step:
            context -= sum(left.pop()[:1]) + step
        flops = 2 * (about.body + about.head) * len(left)
        took += max(about.decode_bytes(context) / read, flops / multiply)
        context += len(left)
    return sum(answer for _, answer in lengths) / took


def workload(setup: Setup) -> Iterator[Figure]:
    """nano-vllm's benchmark: 256 requests of 100 to 1,024 tokens in and as many out, all sent at the start."""
    read, multiply = read_rate(setup), product_rate(setup)
    for name in ["tiny"] if setup.tiny else ["Qwen3-0.6B", "Qwen3-8B"]:
        count, least, most = (6, 4, 20) if setup.tiny else (256, 100, 1024)
        blocks, size = (60, 16) if setup.tiny else (min(9_000, int(most_tokens(name, setup.memory_bytes)) // 64), 64)
        limits = {"max_running_requests": count, "max_batched_tokens": 64 if setup.tiny else 16_384}
        runner = random_runner(name, setup.device, blocks + 1, size, **limits, max_model_len=2 * most + 2)
        random = Random(0)
        engine, hasher = _engine(
            OverlappedEngine, runner, blocks, limits["max_batched_tokens"], count, cached=True, longest=2 * most + 2
        )
        warm, measured = (
            _random_requests(hasher, random, first, number, least, longest)
            for first, number, longest in ((count, min(count, 32), least + 8), (0, count, most))
        )
        _run(engine, warm)  # loads and compiles what mixed steps need
        setup.wait()
        started = time.perf_counter()
        with compilations() as compiled:
            answers = _run(engine, measured)
        took = time.perf_counter() - started
        rate = sum(map(len, answers.values())) / took
        lengths = [(request.prompt_tokens, request.sampling.max_tokens) for request in measured]
        most_rate = workload_rate(name, lengths, read, multiply)
        yield Figure(f"{name} nano-vllm workload", rate, "output tok/s")
        yield of_ceiling(f"{name} workload, of the roof", rate / most_rate, WORKLOAD_GOALS.get(name))
        yield Figure(f"{name} kernels compiled meanwhile", len(compiled), "kernels", 0, not compiled)
        del runner, engine
        _free(setup)


def _random_requests(
    hasher: BlockHasher, random: Random, first: int, count: int, least: int, most: int
) -> list[Generate]:
    """Requests numbered from `first`, of `least` to `most` tokens in and out."""
    return [
        _request(
            number,
            [random.randrange(3, 200) for _ in range(random.randint(least, most))],
            hasher,
            random.randint(least, most),
            temperature=0.6,
            seed=number,
        )
        for number in range(first, first + count)
    ]


# --- (d) replicas ---


def replicas(setup: Setup) -> list[Figure]:
    """Two replicas behind the router, each on half the device: both answer, and a repeated prompt hits the cache."""
    serving = _serving("replicas")
    return [Figure(name, value, unit, met=met) for name, value, unit, met in serving.two_replicas(setup.cuda)]


def ranks(setup: Setup) -> list[Figure]:
    """One replica on two devices must give the same answers as on one."""
    serving = _serving("ranks")
    if setup.cuda and torch.cuda.device_count() < 2:
        raise Skipped("one GPU")
    return [Figure(name, value, unit, met=met) for name, value, unit, met in serving.two_ranks(setup.cuda)]


def _require(stage: str) -> None:
    if absent := missing(FURTHER[stage]):
        raise Skipped(f"not installed: {', '.join(absent)}; install their wheels")


def _serving(stage: str) -> Any:
    _require(stage)
    import serving

    return serving


# --- shared ---


def _engine(
    kind: type[Engine],
    runner: ModelRunner,
    blocks: int,
    budget: int,
    running: int,
    cached: bool,
    longest: int = 200,
) -> tuple[Engine, BlockHasher]:
    hasher = BlockHasher(runner.block_size, seed=3)
    engine = kind(
        limits=SchedulerLimits(running, budget, min(longest, blocks * runner.block_size, MAX_POSITIONS)),
        vocab_size=runner.spec.vocab_size,
        eos_token_ids=(),
        cache=PrefixCache(blocks + 1, runner.block_size, enabled=cached),
        hasher=hasher,
        executor=_Direct(runner),
        rates=SmoothedRates(1000.0, 0.01),
        epoch=1,
    )
    return engine, hasher


class _Direct:
    """Runs and launches plans directly, because importing the product's executor needs ZeroMQ."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.launch, self.draw = (getattr(runner, name, None) for name in ("launch", "draw"))

    def forward(self, plan: StepPlan) -> torch.Tensor:
        logits = self._runner.forward(plan)
        assert logits is not None
        return logits


def _request(number: int, prompt: Sequence[int], hasher: BlockHasher, max_tokens: int, **sampling: Any) -> Generate:
    root, data = BlockHash(b"r" * 16), token_bytes(prompt)
    return Generate(
        request_id=number,
        token_ids=data,
        prompt_tokens=len(prompt),
        root=root,
        block_hashes=join_hashes(hasher.chain(root, data)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
    )


def _run(engine: Engine, requests: Sequence[Generate]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for request in requests:
        engine.add("check", request)
    while engine.has_work:
        result = engine.step()
        if result.error is not None:
            raise result.error
        for output in result.outputs.get("check", []):
            found[output.request_id] += output.token_ids
    return dict(found)


def _free(setup: Setup) -> None:
    if setup.cuda:
        torch.cuda.empty_cache()


STAGES: dict[str, Callable[[Setup], Iterable[Figure]]] = {
    "ceilings": ceilings,
    "kernels": kernels,
    "reference": reference,
    "steps": steps,
    "decode": decode,
    "prefill": prefill,
    "mixed": mixed,
    "workload": workload,
    "replicas": replicas,
    "ranks": ranks,
}
