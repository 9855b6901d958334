"""The Triton kernels compile for Hopper without a GPU: matrix units used, shared memory and registers within bounds."""

import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from common import losses_triton  # noqa: E402
from common import ttt_attention_triton as attention  # noqa: E402

SHARED_MEMORY_OF_A_BLOCK = 227 * 1024  # H100, H200
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNELS = {
    "forward": attention.forward_kernel,
    "queries": attention.queries_kernel,
    "keys": attention.keys_kernel,
}


def compile_for_hopper(kernel, constants, num_warps, num_stages):
    """As a launch with bf16 tensors and sizes divisible by 16 would compile it."""
    kinds = {name: "*i64" for name in ("rows_ptr", "starts_ptr", "range_ptr", "ids_ptr")}
    kinds |= {name: "*fp32" for name in ("lse_ptr", "stats_ptr", "coefficients_ptr", "entropy_ptr")}
    kinds |= {"hits_ptr": "*i8", "scale": "fp32", "scale_log2": "fp32"}
    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        is_pointer = name.endswith("_ptr")
        default = "*bf16" if is_pointer else "i32" if name.startswith("num_") else "constexpr"
        signature[name] = kinds.get(name, default)
        if is_pointer or name in ("num_queries", "num_keys", "num_logits"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, aligned)
    options = dict(num_warps=num_warps, num_stages=num_stages)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembly(compiled, tmp_path) -> str:
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    return subprocess.run([CUOBJDUMP, "-sass", file], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("heads,kv,d", [(64, 8, 128), (9, 3, 64), (64, 64, 256)], ids=["kimi", "smollm2", "mla"])
@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernel(name, heads, kv, d, tmp_path):
    use = dict(attention.settings(d)[name])
    warps, stages = use.pop("num_warps"), use.pop("num_stages")
    compiled = compile_for_hopper(KERNELS[name], dict(HEADS=heads, GROUP=heads // kv, D=d) | use, warps, stages)
    assert compiled.metadata.shared <= SHARED_MEMORY_OF_A_BLOCK
    code = assembly(compiled, tmp_path)
    spilled = code.count("LDL") + code.count("STL")
    assert spilled <= 100, f"{spilled} accesses to spilled registers"
    assert "HGMMA" in code  # products on the matrix units


def test_cross_entropy_kernel(tmp_path):
    sizes = dict(STEPS=7, ROWS=8, BLOCK=losses_triton.BLOCK)
    compiled = compile_for_hopper(losses_triton.cross_entropy_kernel, sizes, losses_triton.WARPS, 3)
    code = assembly(compiled, tmp_path)
    assert code.count("LDL") + code.count("STL") == 0
    assert "LDG.E.128" in code or "LDG.E.64" in code  # wide loads


def test_a_block_too_large_is_noticed(tmp_path):
    """The check can fail: blocks of 128 x 128 in the keys' gradient spill hundreds of registers."""
    sizes = dict(HEADS=64, GROUP=8, D=128, BLOCK_Q=128, BLOCK_K=128)
    code = assembly(compile_for_hopper(attention.keys_kernel, sizes, 8, 1), tmp_path)
    assert code.count("LDL") + code.count("STL") > 200
