"""Attention by plain products: as near to double precision as torch's kernel, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_lab.diffusion.attention import PRODUCTS_UP_TO, attend


def errors(*, products: bool, length: int, scale: float, mean: float) -> list[float]:
    """Relative errors of the output and of the gradients of q, k and v in bf16, with autocast on as in training."""
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(2, 3, length, 32), dim=-1).bfloat16().requires_grad_() for _ in range(3))
    with torch.no_grad():
        v += mean
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    logits = doubles[0] @ doubles[1].transpose(-1, -2) * scale
    exact = logits.softmax(-1) @ doubles[2]
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, scale=scale, products=products)
    weights = torch.randn_like(found)
    wanted = [exact, *torch.autograd.grad(exact, doubles, weights.double())]
    made: list[Tensor] = [found, *torch.autograd.grad(found, [q, k, v], weights)]
    assert all(x.dtype == torch.bfloat16 for x in made)
    return [
        float((x.detach().double() - y.detach()).norm() / y.detach().norm()) for x, y in zip(made, wanted, strict=True)
    ]


@pytest.mark.parametrize(
    ("length", "scale", "mean"), [(64, 16.0, 0.0), (17, 0.18, 0.0), (PRODUCTS_UP_TO, 16.0, 0.0), (64, 16.0, 4.0)]
)
def test_products_are_as_exact_as_the_kernel_and_round_no_logits(length: int, scale: float, mean: float) -> None:
    """Logits of 16 rounded to bf16 would be off by up to 0.06, and every weight by as much of itself.

    Where all values have a large part in common, torch's own kernel is off by several percent in the gradients.
    """
    products, kernel = (errors(products=which, length=length, scale=scale, mean=mean) for which in (True, False))
    for ours, torchs in zip(products, kernel, strict=True):
        assert ours < min(1.5 * torchs, 4e-3)


def test_in_single_precision_and_for_many_tokens_it_is_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    kernel = F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        called.append(q.shape)
        return kernel(q, k, v, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for shape, dtype in (
        ((1, 1, 8, 4), torch.float32),
        ((1, 1, PRODUCTS_UP_TO + 1, 4), torch.bfloat16),
        ((1, 1, PRODUCTS_UP_TO, 4), torch.bfloat16),
    ):
        q = torch.randn(shape).to(dtype)
        torch.testing.assert_close(
            attend(q, q, q, scale=0.5, products=True), kernel(q, q, q, scale=0.5), atol=2e-2, rtol=2e-2
        )
    assert called == [(1, 1, 8, 4), (1, 1, PRODUCTS_UP_TO + 1, 4)]


def test_how_others_multiply_stays_as_it_was() -> None:
    """The products allow oneDNN to round its factors: for these alone."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    q = torch.randn(1, 1, 4, 4).bfloat16()
    attend(q, q, q, scale=1.0, products=True)
    assert settings.fp32_precision == before
    a = torch.randn(64, 64)
    assert (a @ a - (a.double() @ a.double())).norm() < 1e-5 * (a @ a).norm()
