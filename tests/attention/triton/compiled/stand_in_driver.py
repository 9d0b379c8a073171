"""Stand-in for the CUDA driver of Triton: vispe's own launch code compiles its kernels, and nothing runs.

Within `stand_in_gpu`, tensors in CPU memory report a GPU of the requested compute capability. Each launch is
specialised as on that GPU, with the real operands, their types and their alignment. Outputs stay uninitialised.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vispe.attention.backends.triton import device
from vispe.attention.transform import pairs

# bytes per block, as the driver reports them
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Kernel:
    """A compiled kernel, with the types of its arguments, its constants and launch options."""

    def __init__(self, source, metadata):
        self.name, self.arch = source.fn.__name__, metadata.target.arch
        self.signature = dict(source.signature)
        self.constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
        self.warps, self.stages, self.shared = metadata.num_warps, metadata.num_stages, metadata.shared
        self.binary = None

    @cached_property
    def resources(self):
        """Registers per thread, bytes of spilled registers per thread, and bytes of shared memory per block."""
        text = self._inspect("cuobjdump", "-res-usage")
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
        return {"registers": registers, "spilled": stack, "shared": self.shared}

    @cached_property
    def instructions(self):
        """Tuples (opcode, operands, label) of the machine code; one of opcode and label is empty."""
        pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);|^(\.L_\w+):"
        return re.findall(pattern, self._inspect("nvdisasm", "-c"), re.M)

    def _inspect(self, tool, option):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(self.binary)
            done = subprocess.run([TOOLS / tool, option, path], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr


class StandInDriver:
    """The part of a Triton driver that launches use.

    Args:
        arch: compute capability, as 90.
        compiles: whether kernels are compiled; otherwise `signatures` records what would be compiled.

    `launches` has the kernel of each launch, in order, and `arguments` those of the last launch. `signatures` has the
    types of the arguments of each kernel that Triton would compile, by name of the kernel and cache key.
    """

    def __init__(self, arch, compiles=True):
        self.arch, self.compiles, self.launches, self.signatures, self.utils = arch, compiles, [], {}, self

    def launcher_cls(self, source, metadata):
        """Return the launch function of a kernel; Triton loads its binary next."""
        self.loading = kernel = Kernel(source, metadata)
        # Triton keeps compiled kernels for the process, so the driver of the launch may be another one
        return lambda *args: driver.active.launch(kernel, args)

    def launch(self, kernel, args):
        self.launches.append(kernel)
        self.arguments = args

    def load_binary(self, name, binary, shared, index):
        self.loading.binary = binary
        return object(), object(), 0, 0, 1024

    def get_device_properties(self, index):
        return {"max_shared_mem": SHARED[self.arch], "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        # Triton caches compiled kernels per device
        return self.arch if self.compiles else -self.arch

    def get_current_stream(self, index):
        return 0

    def unload_module(self, module):
        """Do nothing; called when a kernel is deleted."""

    def skips_compilation(self, fn, key, compile, **details):
        """Record what would be compiled; a hook of Triton, called where it has no kernel for the arguments."""
        self.signatures[fn.jit_function.__name__, key] = compile["signature"]
        return not self.compiles


@contextmanager
def stand_in_gpu(arch, compiles=True):
    """Yield the `StandInDriver` of a GPU that tensors in CPU memory are on."""
    stand_in = StandInDriver(arch, compiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", stand_in)
        patch.setattr(knobs.runtime, "jit_cache_hook", stand_in.skips_compilation)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
        patch.setattr(torch.Tensor, "is_cpu", property(lambda x: False))
        patch.setattr(torch.cuda, "get_device_capability", lambda *args: divmod(arch, 10))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "device", lambda x: nullcontext())
        # no first launch, whose output would be checked
        patch.setattr(device, "_TRIED", {("cpu", None)})
        patch.setattr(device, "_FAILED", {})
        # rotations inspect the type of the device
        patch.setattr(pairs, "INTERPRETED", True)
        yield stand_in
