"""bf16 where the processor has no instructions for it: exact products, rounded once.

In a process of its own, since torch's kernels are replaced for all of it.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from regauge.accelerators import _widened

def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to(dtype)

def same(found, exact):
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())

generator = torch.Generator().manual_seed(7)
a, b, c = draw(33, 65), draw(65, 17), draw(17)
batched = draw(3, 33, 65), draw(3, 65, 17), draw(3, 33, 17)
wide = [each.float() for each in batched]
before = torch.mm(a.float(), b.float())
assert _widened.install() is _widened.install()

assert torch.equal(torch.mm(a.float(), b.float()), before), "fp32 is not touched"
same(a @ b, before)
same(torch.mm(a, b, out=torch.empty(33, 17, dtype=torch.bfloat16)), before)
exact = torch.addmm(c.float(), a.float(), b.float(), beta=0.5, alpha=2)
same(torch.addmm(c, a, b, beta=0.5, alpha=2), exact)
same(torch.bmm(*batched[:2]), torch.bmm(*wide[:2]))
same(torch.baddbmm(batched[2], *batched[:2]), torch.baddbmm(wide[2], *wide[:2]))

grown = draw(33, 17)
summed = grown.float()
torch.addmm(grown, a, b, out=grown)  # into what it reads
same(grown, torch.addmm(summed, a.float(), b.float()))

narrow = [draw(2, 4, 16, 8).requires_grad_() for _ in range(3)]
wide = [each.detach().float().requires_grad_() for each in narrow]
mask = torch.ones(16, 16, dtype=torch.bool).tril()
found, exact = attention(*narrow, attn_mask=mask), attention(*wide, attn_mask=mask)
same(found, exact)
found.float().sum().backward()
exact.sum().backward()
for one, other in zip(narrow, wide):
    assert one.grad.dtype == torch.bfloat16
    assert (one.grad.float() - other.grad).abs().max() < 0.02 * other.grad.abs().max()

module = torch.nn.Sequential(torch.nn.Linear(65, 32), torch.nn.GELU(), torch.nn.Linear(32, 17))
module.bfloat16()(a).sum().backward()
assert all(each.grad is not None and each.grad.isfinite().all() for each in module.parameters())
print("all the same")
"""


def test_products_of_bf16_are_those_of_fp32_rounded_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all the same\n", done.stderr
