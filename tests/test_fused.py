"""The joined kernels against torch's own, in double precision: values and every gradient, at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion import fused
from ddpm_lab.workload import Unsupported

DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of the relative error: what rounding the result to the dtype explains."""
BY_OPERATORS = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""The same where results between the operators are rounded too."""


def values(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape) * 2 + mean).to(dtype).requires_grad_()


def check(function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Compare value and gradients with the exact function of the same numbers in double precision."""
    result = function(*inputs)
    weights = torch.randn_like(result)
    doubles = [i.detach().double().requires_grad_() for i in inputs]
    expected = exact(*doubles)
    pairs = [(result, expected)]
    gradients = torch.autograd.grad(expected, doubles, weights.double())
    pairs += zip(torch.autograd.grad(result, inputs, weights), gradients, strict=True)
    for actual, wanted in pairs:
        error = (actual.double() - wanted).norm() / wanted.norm()
        assert error < BOUND[result.dtype]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["compiled", "operators"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute: the kernels in C++, and the operators that a GPU gets."""
    if request.param == "operators":
        monkeypatch.setattr(fused, "_compiled", lambda *_: False)
        monkeypatch.setitem(globals(), "BOUND", BY_OPERATORS)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("extras", ["", "scale_shift", "residual", "before", "before scale_shift residual"])
@pytest.mark.parametrize(("shape", "groups"), [((2, 16, 8, 8), 8), ((3, 90, 3, 5), 9), ((1, 64, 1, 1), 8)])
def test_group_norm(dtype: torch.dtype, silu: bool, extras: str, shape: tuple[int, ...], groups: int) -> None:
    n, c = shape[:2]
    shifted, scaled, added = (name in extras for name in ("before", "scale_shift", "residual"))
    optional = {
        "before": values(n, c, dtype=torch.float32) if shifted else None,
        "scale_shift": values(n, 2 * c, dtype=torch.float32) if scaled else None,
        "residual": values(*shape, dtype=dtype) if added else None,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    inputs = [values(*shape, dtype=dtype, mean=3), values(c, dtype=torch.float32), values(c, dtype=torch.float32)]

    def joined(x: Tensor, gain: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        norm = nn.GroupNorm(groups, c)
        del norm.weight, norm.bias
        norm.weight, norm.bias = gain, bias  # type: ignore[assignment]
        return fused.group_norm(x, norm, silu=silu, **dict(zip(given, rest, strict=True)))

    def apart(x: Tensor, gain: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        extra = dict(zip(given, rest, strict=True))
        h = F.group_norm(x + extra["before"][:, :, None, None] if shifted else x, groups, gain, bias)
        if scaled:
            scale, shift = extra["scale_shift"][:, :, None, None].chunk(2, dim=1)
            h = h * (scale + 1) + shift
        h = F.silu(h) if silu else h
        return h + extra["residual"] if added else h

    check(joined, apart, [*inputs, *given.values()])


def test_group_norm_keeps_its_digits_beside_a_large_mean() -> None:
    x = torch.randn(1, 8, 32, 32) + 1000
    norm = nn.GroupNorm(2, 8)
    error = fused.group_norm(x, norm, silu=False).double() - norm.double()(x.double())
    assert error.abs().max() < 2e-3  # 1000 itself is only known to 6e-5


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 3, 17), (7, 1, 1024)])
def test_layer_norm(dtype: torch.dtype, added: bool, shape: tuple[int, ...]) -> None:
    c = shape[-1]
    inputs = [values(*shape, dtype=dtype, mean=1), values(c, dtype=torch.float32), values(c, dtype=torch.float32)]
    inputs += [values(*shape, dtype=dtype)] if added else []

    def joined(x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        norm = nn.LayerNorm(c)
        del norm.weight, norm.bias
        norm.weight, norm.bias = gain, bias  # type: ignore[assignment]
        return fused.layer_norm(x, norm, residual=residual)

    def apart(x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        h = F.layer_norm(x, (c,), gain, bias)
        return h if residual is None else h + residual

    check(joined, apart, inputs)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", fused.HEAD_WIDTHS)
@pytest.mark.parametrize(("count", "length", "heads"), [(2, 37, 3), (1, 1, 1), (3, 64, 4), (1, 100, 2)])
def test_linear_attention(dtype: torch.dtype, width: int, count: int, length: int, heads: int) -> None:
    def apart(qkv: Tensor) -> Tensor:
        q, k, v = (part.view(count, length, heads, width).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        context = k.softmax(-2).transpose(-1, -2) @ v
        out: Tensor = (q.softmax(-1) * width**-0.5 @ context).transpose(1, 2).flatten(2)
        return out

    qkv = values(count, length, 3 * heads * width, dtype=dtype)
    if length > 1:  # over one position the gradient of the keys is zero, and has no relative error
        check(lambda x: fused.linear_attention(x, heads), apart, [qkv])
    else:
        torch.testing.assert_close(fused.linear_attention(qkv, heads), apart(qkv), rtol=2e-2, atol=1e-5)


def test_keys_that_grow_from_position_to_position_are_summed_as_one() -> None:
    """Sums of exponentials are relative to the largest key so far, which here is another one in every tile."""
    qkv = values(2, 130, 3 * 2 * 16, dtype=torch.float32).detach()
    qkv[..., 32:64] += torch.linspace(-60, 60, 130)[:, None]

    def apart(qkv: Tensor) -> Tensor:
        q, k, v = (part.view(2, 130, 2, 16).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        out: Tensor = (q.softmax(-1) / 4 @ (k.softmax(-2).transpose(-1, -2) @ v)).transpose(1, 2).flatten(2)
        return out

    check(lambda x: fused.linear_attention(x, 2), apart, [qkv.requires_grad_()])


def test_extreme_values_stay_finite_and_nan_is_not_hidden() -> None:
    norm = nn.GroupNorm(1, 4)
    x = torch.tensor([-1e4, -100.0, 100.0, 1e4]).reshape(1, 4, 1, 1).expand(1, 4, 2, 2)
    torch.testing.assert_close(fused.group_norm(x * 1e3, norm), F.silu(norm(x * 1e3)), rtol=1e-4, atol=1e-5)
    assert fused.linear_attention(torch.full((1, 4, 48), 1e4), 1).isfinite().all()
    broken = torch.zeros(1, 4, 2, 2)
    broken[0, 1, 1, 1] = torch.nan
    assert fused.group_norm(broken, norm).isnan().any()
    for part in range(3):  # of queries, of keys, of values
        qkv = torch.zeros(1, 4, 48)
        qkv[0, 1, 16 * part] = torch.nan
        assert fused.linear_attention(qkv, 1).isnan().any()


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    x, norm = torch.randn(5, 16, 9, 9), nn.GroupNorm(4, 16)
    qkv = torch.randn(1, 70, 3 * 3 * 16)  # one image: with two threads each head is taken apart
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, attended = fused.group_norm(x, norm), fused.linear_attention(qkv, 3)
        torch.set_num_threads(2)
        assert torch.equal(fused.group_norm(x, norm), one)
        assert torch.equal(fused.linear_attention(qkv, 3), attended)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["before", "scale_shift", "residual"])
def test_what_has_another_shape_is_refused(name: str) -> None:
    """The kernel would read beyond its end."""
    with pytest.raises(ValueError, match=rf"{name} is \(2, 3\): for images \(2, 8, 4, 4\) give"):
        fused.group_norm(torch.randn(2, 8, 4, 4), nn.GroupNorm(2, 8), **{name: torch.randn(2, 3)})  # type: ignore[arg-type]


def test_without_a_compiler_it_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match=r"no-such-compiler.*apt install"):
        fused.library.__wrapped__()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("int main( {", "did not compile"),
        ("void nowhere(); void here() { nowhere(); }", "cannot be loaded.*CXX=g"),  # as of another OpenMP than torch's
    ],
)
def test_a_compiler_that_does_not_serve_is_unsupported_and_leaves_nothing(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "fused.cpp"
    broken.write_text(source)
    monkeypatch.setattr(fused, "SOURCES", (broken,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(Unsupported, match=words):
        fused.library.__wrapped__()
    assert list((tmp_path / "cache" / "ddpm_lab").iterdir()) == []


def test_one_pool_of_threads() -> None:
    """A second OpenMP library in the process would fight the first for the cores."""
    fused.group_norm(torch.randn(2, 8, 4, 4), nn.GroupNorm(2, 8))
    pools = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert len(pools) <= 1
