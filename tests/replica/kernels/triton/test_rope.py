"""Fused norm, rotation and store: queries and stored KV equal float64, and no other slot is written."""

import math

import pytest
import torch

from homing.replica.models.base import Rotary

from ..layouts import DTYPES_BESIDE_8_BITS, IMPLEMENTATIONS, OF_8_BITS, TOLERANCE, error

SLOTS = [37, -1, 20, 5]
PAGES = 5


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turn(x, angles):
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(4, 2, 64, 16), (5, 1, 96, 8), (3, 3, 128, 64), (2, 1, 64, 256)]
)
def test_equals_float64(implementation, dtype, norms, heads, kv_heads, dim, page, device):
    """Head counts that do not fill a program, head dims that are no power of two; padding tokens store nothing."""
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(len(SLOTS), (heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype)
    angles = torch.rand(len(SLOTS), dim // 2, generator=generator).to(device) * 100
    q_norm, k_norm = (torch.randn(dim, generator=generator).to(device, dtype) for _ in range(2))
    rotary = Rotary(angles.cos(), angles.sin(), q_norm if norms else None, k_norm if norms else None, 1e-6)
    keys, values = (torch.full((PAGES, page, kv_heads, dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    q, k, v = qkv.double().view(len(SLOTS), -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms:
        q, k = rms(q, q_norm.double()), rms(k, k_norm.double())

    queries = implementation().rotate_and_store(qkv, rotary, torch.tensor(SLOTS, device=device), keys, values)

    stored = torch.tensor(SLOTS)[torch.tensor(SLOTS) >= 0]
    kept = torch.tensor([slot >= 0 for slot in SLOTS])
    assert error(queries, turn(q, angles.double()).cpu()) < TOLERANCE[dtype]
    assert error(keys.flatten(0, 1)[stored], turn(k, angles.double())[kept].cpu()) < TOLERANCE[dtype]
    assert torch.equal(values.flatten(0, 1)[stored].cpu(), v[kept].to(dtype).cpu())
    for pages in (keys, values):
        others = [slot for slot in range(PAGES * page) if slot not in SLOTS]
        assert bool((pages.flatten(0, 1)[others] == 7).all())


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("implementation", OF_8_BITS)
@pytest.mark.parametrize("dtype", DTYPES_BESIDE_8_BITS, ids=str)
def test_8_bits_hold_the_nearest_number_there_is(implementation, dtype, device):
    """Values out of range become the largest number, but NaN stays NaN, because its request must fail."""
    numbers = torch.tensor([0.0, -0.0, 1.0, 1.08, -17.3, 448.0, 500.0, -1e4, 2e-3, 1e-4, -3.1, 240.0, 7.0, 0.3])
    head = torch.cat([numbers[:7], torch.tensor([math.inf]), numbers[7:], torch.tensor([math.nan])])
    qkv = head.repeat(3)[None].to(device, dtype)
    keys, values = (torch.zeros(2, 16, 1, 16, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    still = Rotary(torch.ones(1, 8, device=device), torch.zeros(1, 8, device=device), None, None, 1e-6)

    implementation().rotate_and_store(qkv, still, torch.tensor([21], device=device), keys, values)

    wanted = numbers.to(dtype).float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    for pages in (keys, values):
        slots = pages.flatten(0, 1)[:, 0].float().cpu()
        stored = slots[21]
        assert torch.equal(torch.cat([stored[:7], stored[8:15]]), wanted)
        assert stored[[7, 15]].isnan().all()
        assert not torch.cat([slots[:21], slots[22:]]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_store_nothing(implementation, device):
    """A batch that consists only of padding."""
    keys, values = (torch.full((2, 16, 1, 64), 7.0, device=device) for _ in range(2))
    wave = torch.empty(0, 32, device=device)

    queries = implementation().rotate_and_store(
        torch.empty(0, 4 * 64, device=device),
        Rotary(wave, wave, None, None, 1e-6),
        torch.empty(0, dtype=torch.int64, device=device),
        keys,
        values,
    )

    assert queries.shape == (0, 2, 64)
    assert bool((keys == 7).all() and (values == 7).all())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_of_wider_tensors_are_read_by_their_rows(implementation, device):
    """Products return such slices."""
    wide, slots = torch.randn(3, 200, device=device), torch.tensor([1, 2, 20], device=device)
    rotary = Rotary(*torch.randn(2, 3, 8, device=device), None, None, 1e-6)

    found = []
    for qkv in (wide[:, :64], wide[:, :64].clone()):
        keys, values = (torch.zeros(2, 16, 1, 16, device=device) for _ in range(2))
        found.append((implementation().rotate_and_store(qkv, rotary, slots, keys, values), keys, values))

    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
