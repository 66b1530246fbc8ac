"""The Triton kernels compile to machine code for CUDA as they are launched; none is run.

Triton's interpreter, which checks what the kernels compute, accepts what the compiler refuses.
Compiling takes no GPU: the kernels are launched through the package's own functions, with a driver
that names a target, and every launch ends when its machine code is there.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ragged_format as rf

pytestmark = pytest.mark.triton

# All that a block may have on both targets without asking for more.
SHARED_BYTES = 48 << 10
REGISTERS = 65_536
KERNELS = ["_bags_kernel", "_dots_kernel", "_rows_kernel"]


class Target:
    """A driver of Triton that has a target and nothing to run on."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Launches of a target's kernels, each with its machine code."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from ragged_format.torch.head import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_kernels, "_check_usable", lambda out: None)
    made = []
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made.append(SimpleNamespace(name=self.__name__, grid=grid, kernel=kernel))
        return kernel

    def on(capability):
        monkeypatch.setattr(driver, "_active", Target(capability))
        return made

    monkeypatch.setattr(JITFunction, "run", compiled)
    return on


def launch_all(dtype, hidden_width):
    from ragged_format.torch.head import triton_kernels

    sums = torch.float64 if dtype == torch.float64 else torch.float32
    hidden, weight = (torch.zeros(rows, hidden_width, dtype=dtype) for rows in (5, 11))
    index, grad = torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=sums)
    triton_kernels.dots(hidden, weight, index, index, grad)
    triton_kernels.add_hidden(weight, index[:5], index[:6], index, grad, hidden.to(sums))
    triton_kernels.add_weight(hidden, index, index, grad, weight.to(sums))


def resources(cubin, path):
    """Return what the machine code of a kernel uses: REG a thread, STACK, LOCAL in bytes."""
    import triton

    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run(
        [tool, "--dump-resource-usage", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if "REG:" in line)
    return {key: int(value) for key, value in (part.split(":") for part in line.split()[:4])}


# A width that the compiler knows to be aligned, one that it does not, and 1, which is a constant.
@pytest.mark.parametrize("hidden_width", [2048, 70, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(launches, tmp_path, capability, dtype, hidden_width):
    made = launches(capability)
    launch_all(dtype, hidden_width)
    assert sorted(launch.name for launch in made) == KERNELS
    for launch in made:
        kernel = launch.kernel
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        used = resources(kernel.asm["cubin"], tmp_path / f"{launch.name}.cubin")
        assert (used["STACK"], used["LOCAL"]) == (0, 0), "registers are spilled to memory"
        assert used["REG"] * kernel.metadata.num_warps * 32 <= REGISTERS
        assert kernel.metadata.shared <= SHARED_BYTES


def test_tensors_on_the_cpu_are_a_typed_error():
    with pytest.raises(rf.UnsupportedFeatureError, match="CPU"):
        launch_all(torch.float32, 64)


def test_sums_are_of_the_width_that_results_have(launches):
    made = launches(90)
    for dtype, kind in ((torch.bfloat16, "f32"), (torch.float64, "f64")):
        made.clear()
        launch_all(dtype, 2048)
        code = {launch.name: launch.kernel.asm["ptx"] for launch in made}
        for name in ("_bags_kernel", "_rows_kernel"):
            atomics = [line for line in code[name].splitlines() if "atom.global" in line]
            assert atomics
            # Additions need no order among each other or with other memory.
            assert all(".relaxed." in line and kind in line for line in atomics)
        assert f"fma.rn.{kind}" in code["_dots_kernel"]


def test_grids_cover_all_entries_and_columns(launches):
    made = launches(90)
    launch_all(torch.float32, 70)
    grids = {launch.name: launch.grid for launch in made}
    assert grids == {"_dots_kernel": (2,), "_bags_kernel": (5, 2), "_rows_kernel": (2, 2)}


def test_kernels_are_launched_on_the_device_of_their_tensors(launches, monkeypatch):
    """Triton launches on the current device, which with several GPUs may be another."""
    chosen = []

    class Chosen:
        def __init__(self, number):
            chosen.append(number)

        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    launches(90)
    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    launch_all(torch.float32, 64)
    assert chosen == [3, 3, 3]
