"""bf16 kernels for processors without bf16 instructions: exact products, rounded once.

The test runs in a separate process, because the kernels are replaced for the whole process.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from regauge.accelerators import _bf16_emulation

def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to(dtype)

def check_equal(output, exact):
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())

generator = torch.Generator().manual_seed(7)
a, b, c = draw(33, 65), draw(65, 17), draw(17)
batched = draw(3, 33, 65), draw(3, 65, 17), draw(3, 33, 17)
wide = [value.float() for value in batched]
before = torch.mm(a.float(), b.float())
assert _bf16_emulation.install() is _bf16_emulation.install()

assert torch.equal(torch.mm(a.float(), b.float()), before), "fp32 is unchanged"
check_equal(a @ b, before)
check_equal(torch.mm(a, b, out=torch.empty(33, 17, dtype=torch.bfloat16)), before)
exact = torch.addmm(c.float(), a.float(), b.float(), beta=0.5, alpha=2)
check_equal(torch.addmm(c, a, b, beta=0.5, alpha=2), exact)
check_equal(torch.bmm(*batched[:2]), torch.bmm(*wide[:2]))
check_equal(torch.baddbmm(batched[2], *batched[:2]), torch.baddbmm(wide[2], *wide[:2]))

accumulated = draw(33, 17)
before = accumulated.float()
torch.addmm(accumulated, a, b, out=accumulated)  # the output is also an input
check_equal(accumulated, torch.addmm(before, a.float(), b.float()))

narrow = [draw(2, 4, 16, 8).requires_grad_() for _ in range(3)]
wide = [value.detach().float().requires_grad_() for value in narrow]
mask = torch.ones(16, 16, dtype=torch.bool).tril()
output, exact = attention(*narrow, attn_mask=mask), attention(*wide, attn_mask=mask)
check_equal(output, exact)
output.float().sum().backward()
exact.sum().backward()
for value, exact in zip(narrow, wide):
    assert value.grad.dtype == torch.bfloat16
    assert (value.grad.float() - exact.grad).abs().max() < 0.02 * exact.grad.abs().max()

module = torch.nn.Sequential(torch.nn.Linear(65, 32), torch.nn.GELU(), torch.nn.Linear(32, 17))
module.bfloat16()(a).sum().backward()
gradients = [parameter.grad for parameter in module.parameters()]
assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
print("all equal")
"""


def test_bf16_products_equal_fp32_products_that_are_rounded_once() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout == "all equal\n", done.stderr
