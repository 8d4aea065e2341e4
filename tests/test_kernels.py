"""The lab's kernels against torch's own in double precision: values and every gradient, at awkward sizes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_networks import error
from torch import Tensor, nn

from ddpm_lab.diffusion import kernels
from ddpm_lab.diffusion.blocks import PRODUCTS_UP_TO, attend
from ddpm_lab.diffusion.kernels import HEAD_WIDTH, LANES, Convolution, convolve, library
from ddpm_lab.workload import Unsupported

BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of the relative error: what rounding the result to the dtype explains."""
BY_OPERATORS = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
"""The same where results between the operators are rounded too."""


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "operators"])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, float]:
    """Both ways to compute, with their errors: the kernels in C++, and the operators that a GPU gets."""
    if request.param == "compiled":
        return BOUND
    monkeypatch.setattr(kernels, "_compiled", lambda *_: False)
    return BY_OPERATORS


@pytest.fixture
def pairs() -> None:
    if "weights_gradient" not in library():
        pytest.skip("this processor has no AVX512_BF16, which the kernel is for")


def values(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape) * 2 + mean).to(dtype).requires_grad_()


def check(
    function: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor], bound: float
) -> None:
    """Compare value and gradients with the exact function of the same numbers in double precision."""
    result = function(*inputs)
    weights = torch.randn_like(result)
    doubles = [i.detach().double().requires_grad_() for i in inputs]
    expected = exact(*doubles)
    gradients = torch.autograd.grad(expected, doubles, weights.double())
    for actual, wanted in zip(
        [result, *torch.autograd.grad(result, inputs, weights)], [expected, *gradients], strict=True
    ):
        assert error(actual, wanted) < bound


def with_weights(norm: nn.GroupNorm | nn.LayerNorm, gain: Tensor, bias: Tensor) -> Any:
    del norm.weight, norm.bias
    norm.weight, norm.bias = gain, bias  # type: ignore[assignment]
    return norm


@pytest.mark.parametrize("dtype", list(BOUND))
def test_group_norm(dtype: torch.dtype, bound: dict[torch.dtype, float]) -> None:
    def joined(x: Tensor, gain: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        norm = with_weights(nn.GroupNorm(groups, c), gain, bias)
        return kernels.group_norm(x, norm, silu=silu, **dict(zip(names, rest, strict=True)))

    def apart(x: Tensor, gain: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        extra = dict(zip(names, rest, strict=True))
        h = F.group_norm(x + extra["before"][:, :, None, None] if "before" in extra else x, groups, gain, bias)
        if "scale_shift" in extra:
            scale, shift = extra["scale_shift"][:, :, None, None].chunk(2, dim=1)
            h = h * (scale + 1) + shift
        h = F.silu(h) if silu else h
        return h + extra["residual"] if "residual" in extra else h

    each = ("", "scale_shift", "residual", "before", "before scale_shift residual")
    shapes = ((2, 16, 8, 8), 8), ((3, 176, 3, 5), 11), ((1, 64, 1, 1), 8), ((3, 90, 3, 5), 9)
    for (shape, groups), said in product(shapes, each):
        names, (n, c), silu = said.split(), shape[:2], groups == 8
        optional = {"before": values(n, c), "scale_shift": values(n, 2 * c), "residual": values(*shape, dtype=dtype)}
        given = [optional[name] for name in names]
        near = bound if c % LANES == 0 else BY_OPERATORS
        check(joined, apart, [values(*shape, dtype=dtype, mean=3), values(c), values(c), *given], near[dtype])


@pytest.mark.parametrize("dtype", list(BOUND))
def test_layer_norm(dtype: torch.dtype, bound: dict[torch.dtype, float]) -> None:
    def joined(x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        return kernels.layer_norm(x, with_weights(nn.LayerNorm(c), gain, bias), residual=residual)

    def apart(x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        h = F.layer_norm(x, (c,), gain, bias)
        return h if residual is None else h + residual

    # Over many rows the gradients of gain and bias need sums in single precision, whichever way they are computed.
    shapes = ((2, 5, 64), True), ((1, 3, 48), True), ((7, 1, 1024), True), ((4, 1024, 16), True), ((1, 3, 48), False)
    for shape, added in shapes:
        c = shape[-1]
        residuals = [values(*shape, dtype=dtype)] if added else []
        inputs = [values(*shape, dtype=dtype, mean=1), values(c), values(c), *residuals]
        check(joined, apart, inputs, min(bound[dtype], 6e-3))
    norm = nn.LayerNorm(17)
    torch.testing.assert_close(kernels.layer_norm(x := torch.randn(3, 17), norm), norm(x))


def exact_linear_attention(qkv: Tensor, heads: int) -> Tensor:
    q, k, v = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    context = k.softmax(-2).transpose(-1, -2) @ v
    out: Tensor = (q.softmax(-1) * q.shape[-1] ** -0.5 @ context).transpose(1, 2).flatten(2)
    return out


@pytest.mark.parametrize("dtype", list(BOUND))
def test_linear_attention(dtype: torch.dtype, bound: dict[torch.dtype, float]) -> None:
    for count, length, heads, width in ((2, 37, 3, HEAD_WIDTH), (3, 64, 4, HEAD_WIDTH), (1, 100, 2, 16)):
        qkv = values(count, length, 3 * heads * width, dtype=dtype)
        ours, exact = (partial(f, heads=heads) for f in (kernels.linear_attention, exact_linear_attention))
        check(ours, exact, [qkv], bound[dtype] if width == HEAD_WIDTH else BY_OPERATORS[dtype])
    qkv = values(1, 1, 3 * HEAD_WIDTH, dtype=dtype)  # the gradient of one key is zero, and has no relative error
    torch.testing.assert_close(kernels.linear_attention(qkv, 1), exact_linear_attention(qkv, 1), rtol=2e-2, atol=1e-5)


def test_keys_that_grow_from_position_to_position_are_summed_as_one() -> None:
    """Sums of exponentials are relative to the largest key so far, which here is another one in every tile."""
    qkv = values(2, 130, 3 * 2 * HEAD_WIDTH).detach()
    qkv[..., 2 * HEAD_WIDTH : 4 * HEAD_WIDTH] += torch.linspace(-60, 60, 130)[:, None]
    ours, exact = (partial(f, heads=2) for f in (kernels.linear_attention, exact_linear_attention))
    check(ours, exact, [qkv.requires_grad_()], BOUND[torch.float32])


def test_extreme_values_keep_their_digits_and_nan_is_not_hidden() -> None:
    x, norm = torch.randn(1, 16, 32, 32) + 1000, nn.GroupNorm(2, 16)
    found = kernels.group_norm(x, norm, silu=False).double() - norm.double()(x.double())
    assert found.abs().max() < 2e-3  # 1000 itself is only known to 6e-5
    assert kernels.linear_attention(torch.full((1, 4, 3 * HEAD_WIDTH), 1e4), 1).isfinite().all()
    broken = torch.zeros(1, 16, 2, 2)
    broken[0, 1, 1, 1] = torch.nan
    assert kernels.group_norm(broken, nn.GroupNorm(1, 16)).isnan().any()
    for part in range(3):  # of queries, of keys, of values
        qkv = torch.zeros(1, 4, 3 * HEAD_WIDTH)
        qkv[0, 1, HEAD_WIDTH * part] = torch.nan
        assert kernels.linear_attention(qkv, 1).isnan().any()


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    x, norm = torch.randn(5, 16, 9, 9), nn.GroupNorm(4, 16)
    qkv = torch.randn(1, 70, 3 * 3 * HEAD_WIDTH)  # one image: with two threads each head is taken apart
    torch.set_num_threads(1)
    one, attended = kernels.group_norm(x, norm), kernels.linear_attention(qkv, 3)
    torch.set_num_threads(2)
    assert torch.equal(kernels.group_norm(x, norm), one)
    assert torch.equal(kernels.linear_attention(qkv, 3), attended)


SAME, HALVED, DOUBLED, POINT = (3, 1, 1, False), (4, 2, 1, False), (4, 2, 1, True), (1, 1, 0, False)
"""Taps, stride, padding, and whether transposed."""
CONVOLUTIONS = (  # kind, images, inputs, outputs, height, width, threads
    (SAME, 3, 64, 32, 5, 7, 1),
    (SAME, 5, 192, 32, 8, 8, 3),  # fewer tiles than threads: images are taken apart
    (SAME, 0, 32, 32, 4, 4, 2),
    (HALVED, 2, 64, 32, 9, 7, 1),  # rows and columns that no tap reaches
    (DOUBLED, 3, 32, 64, 5, 7, 1),
    (POINT, 3, 96, 32, 5, 3, 2),
    (SAME, 1, 128, 32, 70, 33, 1),  # some rows of an image at a time
    (SAME, 40, 64, 32, 4, 6, 1),  # some images at a time
    (SAME, 5, 32, 64, 4, 5, 3),  # tiles and images both taken apart
    ((5, 3, 2, False), 2, 32, 32, 9, 8, 2),
)


@pytest.mark.usefixtures("pairs")
def test_convolutions_are_exact_but_for_the_format() -> None:
    """What is bfloat16 is rounded once; the gradients of the weights, in single precision, not at all."""
    for (taps, stride, padding, transposed), images, inputs, outputs, height, width, threads in CONVOLUTIONS:
        torch.set_num_threads(threads)
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        leaves = torch.randn(images, inputs, height, width), torch.randn(*shape, taps, taps), torch.randn(outputs)
        # Rounded, so that autocast rounds nothing.
        x, weight, bias = (leaf.bfloat16().float().requires_grad_() for leaf in leaves)
        with torch.autocast("cpu", torch.bfloat16):
            y = convolve(x, weight, bias, stride=stride, padding=padding, transposed=transposed)
        weights = torch.randn(len(y), 2 * outputs, *y.shape[2:]).bfloat16()[:, outputs:]  # in no order a kernel wants
        whole = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
        usual: Any = F.conv_transpose2d if transposed else F.conv2d
        double = usual(*whole, stride=stride, padding=padding)
        exact = torch.autograd.grad(double, whole, weights.double())
        d_x, d_weight, d_bias = torch.autograd.grad(y, [x, weight, bias], weights)
        assert y.dtype == torch.bfloat16
        assert max(error(y, double), error(d_x, exact[0])) < 4e-3
        assert max(error(d_weight, exact[1]), error(d_bias, exact[2])) < 1e-5


@pytest.mark.usefixtures("pairs")
def test_gradients_lie_as_the_weights_do_and_what_is_no_number_is_not_hidden() -> None:
    """Else the optimizer would copy them in every step."""
    layer = Convolution(64, 32, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(1, 64, 4, 4)
    x[0, 5, 2, 2] = torch.nan
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    assert (gradient.dtype, gradient.stride()) == (torch.float32, layer.weight.stride())
    assert gradient[:, 5].isnan().all()
    assert gradient[:, :5].isfinite().all()


def test_attention_by_products_is_as_exact_as_the_kernel_and_rounds_no_logits() -> None:
    """In bf16, with autocast on: logits of 16 rounded to it would be off by up to 0.06, and every weight as much.

    Where all values have a large part in common, torch's own kernel is off by several percent in the gradients.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    for length, scale, mean in ((64, 16.0, 0.0), (17, 0.18, 0.0), (PRODUCTS_UP_TO, 16.0, 0.0), (64, 16.0, 4.0)):
        q, k, v = (F.normalize(torch.randn(2, 3, length, 32), dim=-1).bfloat16().requires_grad_() for _ in range(3))
        with torch.no_grad():
            v += mean
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = (doubles[0] @ doubles[1].transpose(-1, -2) * scale).softmax(-1) @ doubles[2]
        weights = torch.randn(exact.shape).bfloat16()
        wanted = [exact, *torch.autograd.grad(exact, doubles, weights.double())]
        errors = []
        for products in (True, False):
            with torch.autocast("cpu", torch.bfloat16):
                found = attend(q, k, v, scale=scale, products=products)
            made: list[Tensor] = [found, *torch.autograd.grad(found, [q, k, v], weights)]
            assert all(x.dtype == torch.bfloat16 for x in made)
            errors.append([error(x, y) for x, y in zip(made, wanted, strict=True)])
        assert all(mine < min(1.5 * theirs, 4e-3) for mine, theirs in zip(*errors, strict=True))
    assert settings.fp32_precision == before, "oneDNN may round factors for these products alone"


def test_a_compiler_that_does_not_serve_is_unsupported_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "kernels.cpp"
    monkeypatch.setattr(kernels, "SOURCE", broken)
    unknown = "void nowhere(); void here() { nowhere(); }"  # as of another OpenMP than torch's
    for compiler, source, words in (
        ("g++", "int main( {", "did not compile"),
        ("g++", unknown, "cannot be loaded.*set XDG_CACHE_HOME"),  # as in a folder mounted noexec
    ):
        monkeypatch.setenv("CXX", compiler)
        broken.write_text(source)
        with pytest.raises(Unsupported, match=words) as refused:
            library.__wrapped__()
        assert "\n" not in str(refused.value)
        assert list((tmp_path / "cache" / "ddpm_lab").iterdir()) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match=r"no-such-compiler.*apt install"):
        library.__wrapped__()
