"""The engines on the CPU: a library each of an emulated kernel (Shim) and of its planner (Plans)."""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import modelnew
from tests.cases import (
    DTYPE_NUMBER,
    DTYPES,
    KERNELS,
    LAYOUTS,
    OPERANDS,
    OPERATOR_NUMBER,
    VIEWS,
    Case,
    check_exact,
    in_layout,
    input_pointers,
    integers,
    is_channels_last,
    make_tensors,
    margins_intact,
    references,
    shifted,
    under_a_tf32_step,
    with_margins,
)
from tests.emulation import (
    HOPPER_STAND_IN,
    PROBLEM_FIELDS,
    amalgamate,
    built_beside_the_tests,
    compile_plans,
    compile_simt,
    cpp,
    with_mutations,
)
from tests.mutations import (
    CHOICE_MUTATIONS,
    CHOICE_OF_WGRAD_MUTATIONS,
    DEPTHWISE_MUTATIONS,
    DILATED_MUTATIONS,
    GATHER_MUTATIONS,
    GATHER_PLAN_MUTATIONS,
    MMA_MUTATIONS,
    MMA_PLAN_MUTATIONS,
    PATCHES_MUTATIONS,
    POINTWISE_MUTATIONS,
    POINTWISE_PLAN_MUTATIONS,
    STEM_MUTATIONS,
    STEM_PLAN_MUTATIONS,
    STRIDED_MUTATIONS,
    TMA_MUTATIONS,
    TMA_PLAN_MUTATIONS,
    TMA_WGRAD_MUTATIONS,
    TMA_WGRAD_PLAN_MUTATIONS,
    WGMMA_MUTATIONS,
    WGRAD_MUTATIONS,
    WGRAD_SHIM_MUTATIONS,
)
from tests.problems import (
    MEMORY_ORDERS,
    PIXELS,
    PLANES,
    REFUSAL,
    any_strides,
    gapped_strides,
    mma_strides,
    random_wgrad_case,
)

ENGINE_ENTRY_POINTS = cpp("emulation/engine.h")
DEPTHWISE_ENTRY_POINTS = cpp("emulation/depthwise.h")
COPIES_STAND_IN = cpp("emulation/copies.h")


def with_stand_in(text: str) -> dict[str, str]:
    """The sources, with one text in place of ptx.cuh and of the headers that build on it."""
    return {**modelnew._sources, "ptx.cuh": text, "tensor_map.cuh": "", "wgmma.cuh": ""}


class ShimEngine:
    """An engine that synchronises by __syncthreads alone, compiled by g++ and run thread by thread."""

    def __init__(self, folder: Path, name: str = "direct", mutations: Sequence[tuple] = (), **constants: int) -> None:
        """`constants` replaces the values of constants in the source, to reach what takes large problems."""
        files = [f"{name}.cu", *(["direct.cu"] if name in ("dilated", "patches", "strided") else [])]
        source = amalgamate(with_stand_in(COPIES_STAND_IN), files)
        replacements = {rf"\b{constant} = \w+;": f"{constant} = {value};" for constant, value in constants.items()}
        replacements[r"\b1 << 29 : 1 << 27;"] = "1 << 20 : 1 << 20;"
        replacements |= {rf"\bleast = 1 << {bits};": "least = 1 << 20;" for bits in (24, 29)}
        replacements |= {re.escape(old): new for old, new in mutations}
        for pattern, replacement in replacements.items():
            source, found = re.subn(pattern, replacement, source)
            assert found == 1, pattern
        of_engine = {
            "depthwise": DEPTHWISE_MUTATIONS,
            "dilated": DILATED_MUTATIONS,
            "patches": PATCHES_MUTATIONS,
            "strided": STRIDED_MUTATIONS,
        }
        source = with_mutations(source, of_engine.get(name, {}))
        source = f"#define ENGINE k{name.capitalize()}Engine\n{source}"
        self.operators = tuple(OPERATOR_NUMBER) if name == "direct" else ("fprop", "dgrad")
        more = {
            "depthwise": DEPTHWISE_ENTRY_POINTS,
            "dilated": DILATED_STAND_INS,
            "patches": PATCHES_STAND_INS,
            "strided": STRIDED_STAND_INS,
        }
        entry_points = ENGINE_ENTRY_POINTS + more.get(name, "")
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + entry_points, folder)
        for name in ("engine_refusal", "engine_describe", "simt_message", "simt_launched"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.engine_workspace_bytes.restype = ctypes.c_int64

    @staticmethod
    def fields(case: Case, tensors: dict[str, Tensor], tf32: bool) -> ctypes.Array:
        x, w, y = tensors["x"], tensors["w"], tensors["dy"]
        values = [*case.x_shape, case.K, case.R, case.S, *case.y_shape[2:], case.groups]
        values += [*case.stride, *case.padding, *case.dilation, DTYPE_NUMBER[x.dtype], tf32]
        values += [*x.stride(), *w.stride(), *y.stride()]
        return (ctypes.c_int64 * len(PROBLEM_FIELDS))(*values)

    def run(self, operator: str, case: Case, tensors: dict[str, Tensor], tf32: bool, out: Tensor) -> Tensor:
        """Runs one operator. `tensors` are x, w, dy (y's strides in fprop) and perhaps bias; `out` takes its place."""
        number = OPERATOR_NUMBER[operator]
        place = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}
        fields = self.fields(case, tensors | ({place[operator]: out} if operator in place else {}), tf32)
        assert self.library.engine_refusal(number, fields) is None
        assert self.library.engine_describe(number, fields)
        bytes_needed = self.library.engine_workspace_bytes(number, fields)
        workspace = with_margins(torch.full((-(-bytes_needed // 8),), math.nan, dtype=torch.float64))
        pointers = (ctypes.c_void_p * 6)(*input_pointers(operator, tensors), out.data_ptr(), workspace.data_ptr())
        code = self.library.engine_launch(number, fields, pointers)
        assert code == 0, f"{operator} of {case}: error {code}, {self.library.simt_message().decode()}"
        assert margins_intact(workspace)
        return out

    def __call__(self, case: Case, tensors: dict[str, Tensor], tf32: bool = False) -> dict[str, Tensor]:
        """All four operators or those that the engine takes, into outputs filled with NaN, strided like x, w and dy."""
        places = {"fprop": "dy", "dgrad": "x", "wgrad": "w", "bgrad": "bias"}
        results = {}
        for operator in self.operators:
            shape = (case.K,) if operator == "bgrad" else tensors[places[operator]].shape
            if operator in OPERANDS and self.refuses(operator, case, tensors) and len(self.operators) < 4:
                continue
            out = with_margins(tensors["x"].new_full(shape, math.nan))
            if len(shape) == 4 and is_channels_last(tensors[places[operator]]):
                out = VIEWS["channels_last"](out)
            results[operator] = self.run(operator, case, tensors, tf32, out)
            inner = out.permute(0, 2, 3, 1) if not out.is_contiguous() else out
            assert margins_intact(inner), f"{operator} of {case} writes outside its output"
        return results

    def refuses(self, operator: str, case: Case, tensors: dict[str, Tensor]) -> str | None:
        """Why the engine refuses an operator, whose output would be strided like the tensor in its place."""
        return self.library.engine_refusal(OPERATOR_NUMBER[operator], self.fields(case, tensors, False))

    def describes(self, operator: str, case: Case, tensors: dict[str, Tensor]) -> str:
        return self.library.engine_describe(OPERATOR_NUMBER[operator], self.fields(case, tensors, False)).decode()


@built_beside_the_tests
def direct_shim(folder: Path) -> ShimEngine:
    few_points = ("kLeastPoints = 1 << 17;", "kLeastPoints = 1;")
    return ShimEngine(folder, mutations=[few_points])


@built_beside_the_tests
def depthwise_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "depthwise")


DILATED_STAND_INS = cpp("emulation/dilated.h")
PATCHES_STAND_INS = cpp("emulation/patches.h")
STRIDED_STAND_INS = cpp("emulation/strided.h")


@built_beside_the_tests
def strided_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "strided")


@built_beside_the_tests
def patches_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "patches")


@built_beside_the_tests
def dilated_shim(folder: Path) -> ShimEngine:
    return ShimEngine(folder, "dilated")


@built_beside_the_tests
def direct_shim_of_small_launches(folder: Path) -> ShimEngine:
    """With limits that small problems exceed."""
    return ShimEngine(folder, kMostBlocks=5, kWeightGradBlocks=1, kDepthwiseWgradBlocks=1)


def right(engine: ShimEngine, case: Case) -> bool:
    tensors = make_tensors(case, torch.float32, integers)
    try:
        check_exact(case, engine(case, tensors), tensors)
    except AssertionError:
        return False
    return True


WGMMA_ENTRY_POINTS = cpp("plan_checks/wgmma.cpp")


class WgmmaPlans:
    """The host part of the wgmma engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("wgmma", WGMMA_ENTRY_POINTS, {}, folder)
        for name in ("wgmma_refusal", "wgmma_yields", "wgmma_describe", "wgmma_fault"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.wgmma_cycles.restype = ctypes.c_double

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        dtype: torch.dtype,
        *more: object,
        tf32: bool = True,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides."""
        return self.call(function, operator, self.fields(case, dtype, tf32, memory_format), *more)

    @staticmethod
    def fields(case: Case, dtype: torch.dtype, tf32: bool, memory_format: torch.memory_format) -> ctypes.Array:
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
            for name, shape in shapes.items()
        }
        return ShimEngine.fields(case, tensors, tf32)

    def call(self, function: str, operator: str, fields: ctypes.Array, *more: object) -> str | float | None:
        result = getattr(self.library, f"wgmma_{function}")(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result


@built_beside_the_tests
def wgmma_plans(folder: Path) -> WgmmaPlans:
    return WgmmaPlans(folder)


WGMMA_SPLIT_CONFIGURATIONS = {64, 65, 66, 68, 69, 70, 72, 76}

WGMMA_SHIM_ENTRY_POINTS = cpp("emulation/wgmma.h")
OTHER_ENGINE = cpp("emulation/listed.h")


class WgmmaShim:
    """The wgmma engine, compiled by g++ and run thread by thread: roles, barriers, copies and the matrix instruction.

    What a GPU orders less strictly than this (memory as other threads see it, the asynchronous proxy) it does not show.
    """

    def __init__(self, folder: Path) -> None:
        # Both meet at barriers as ptx.cuh has them.
        files = ["wgmma.cu", "listed.cu"]
        source = amalgamate(with_stand_in(HOPPER_STAND_IN), files)
        source = with_mutations(source, WGMMA_MUTATIONS)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + WGMMA_SHIM_ENTRY_POINTS, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def run(
        self, operator: str, case: Case, tensors: dict[str, Tensor], configuration: int, seed: int, out: Tensor
    ) -> str | None:
        """Runs fprop or dgrad of one configuration into `out`: None if there is no such plan, else what went wrong."""
        tf32 = configuration not in WGMMA_SPLIT_CONFIGURATIONS
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.wgmma_run(OPERATOR_NUMBER[operator], fields, pointers, configuration, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(self, operator: str, case: Case, dtype: torch.dtype, configuration: int, seed: int) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text."""
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        shift = rng.choice([0, 0, 0, 1, 2, 3])  # elements
        tensors = {name: shifted(tensor, shift) for name, tensor in tensors.items()}
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        out = shifted(tensors["x"].new_full(expected.shape, math.nan), rng.choice([0, 0, 0, 1, 2, 3]))
        message = self.run(operator, case, tensors, configuration, seed, out)
        if message == "" and not torch.equal(out, expected.to(dtype)):
            message = f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        if message == "" and not margins_intact(out):
            message = "written outside the output"
        return message


@built_beside_the_tests
def wgmma_shim(folder: Path) -> WgmmaShim:
    return WgmmaShim(folder)


GATHER_ENTRY_POINTS = cpp("plan_checks/gather.cpp")


class GatherPlans:
    """The host part of the gather engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("gather", GATHER_ENTRY_POINTS, GATHER_PLAN_MUTATIONS, folder)
        for name in ("gather_refusal", "gather_yields", "gather_describe", "gather_fault", "gather_seen"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.gather_cycles.restype = ctypes.c_double

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        dtype: torch.dtype,
        *more: object,
        tf32: bool = True,
        strides: dict[str, tuple[int, ...]] | None = None,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides: contiguous ones unless others are named."""
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        for name, of_tensor in (strides or {}).items():
            tensors[name] = tensors[name].as_strided(shapes[name], of_tensor)
        fields = ShimEngine.fields(case, tensors, tf32)
        result = getattr(self.library, f"gather_{function}")(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result

    def fault(self, operator: str, case: Case, dtype: torch.dtype, seed: int) -> str | None:
        """What is wrong with its plans for tensors of any strides at any addresses."""
        rng = random.Random(seed)
        order = rng.choice(MEMORY_ORDERS)  # more often than not of both
        other = rng.choice([order, rng.choice(MEMORY_ORDERS)])
        strides = {"x": any_strides(case.x_shape, order, rng), "dy": any_strides(case.y_shape, other, rng)}
        places = [ctypes.c_uint64(rng.choice([0, 0, 0, 1, 2, 4, 8]) * dtype.itemsize) for _ in range(2)]
        return self("fault", operator, case, dtype, *places, seed, strides=strides)


@built_beside_the_tests
def gather_plans(folder: Path) -> GatherPlans:
    return GatherPlans(folder)


GATHER_SHIM_ENTRY_POINTS = cpp("emulation/gather.h")

# What gather.cu has in assembly of its own.
GATHER_ASSEMBLY = {
    r'asm volatile\("st\.shared\.v4[^;]*;[^;]*;': (
        "simt::check_shared(address, 16); const uint32_t words[4] = {a, b, c, d}; "
        "std::memcpy(simt::smem + address, words, 16);"
    ),
}


class GatherShim:
    """The gather engine in fp32 and fp16, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    def __init__(self, folder: Path) -> None:
        headers = with_stand_in(HOPPER_STAND_IN + MMA_INSTRUCTION)
        # tma multiplies some contained operands.
        source = with_mutations(amalgamate(headers, ["gather.cu", "tma.cu"]), GATHER_MUTATIONS)
        for pattern, replacement in GATHER_ASSEMBLY.items():
            source, found = re.subn(pattern, lambda _, text=replacement: text, source)
            assert found == 1, pattern
        source = source.replace("run<BFloat16>(", "run<Half>(")  # the same code
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + GATHER_SHIM_ENTRY_POINTS, folder)
        for name in ("simt_message", "gather_launched"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.gather_sources.restype = ctypes.c_uint

    def fault(self, operator: str, case: Case, dtype: torch.dtype, shape: int, layout: str, seed: int) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text.

        None if there is no plan of this shape of a tile.
        """
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        shift = rng.choice([0, 0, 0, 1, 2])  # elements
        tensors = {name: shifted(tensor, shift) for name, tensor in tensors.items()}
        inner = shifted(tensors["x"].new_full(expected.shape, math.nan), rng.choice([0, 0, 0, 1, 2]))
        out = inner
        if layout == "channels_last":
            for name in ("x", "dy"):
                tensors[name] = shifted(tensors[name].permute(0, 2, 3, 1), shift).permute(0, 3, 1, 2)
            N, K, P, Q = expected.shape
            out = inner.view(N, P, Q, K).permute(0, 3, 1, 2)
        if rng.random() < 0.5:
            tensors["w"] = shifted(tensors["w"].permute(0, 2, 3, 1), shift).permute(0, 3, 1, 2)
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.gather_run(OPERATOR_NUMBER[operator], fields, pointers, shape, seed)
        if code != 0:
            return None if code == -1 else f"error {code}, {self.library.simt_message().decode()}"
        if self.done_again() != 0:
            return "integers that are not contained"
        if shape in GATHER_CONTAINED:
            vectors = contain_vectors(operator, case, tensors[OPERANDS[operator][0]])
            if not self.contained_by() <= vectors:
                return f"contained by {self.contained_by()}, not by {vectors}"
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        return "" if margins_intact(inner) else "written outside the output"

    def run(
        self, operator: str, case: Case, tensors: dict[str, Tensor], shape: int, seed: int, out: Tensor
    ) -> str | None:
        """Runs fprop or dgrad of one shape of a tile into `out`: None if there is no plan, else what went wrong."""
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        code = self.library.gather_run(OPERATOR_NUMBER[operator], fields, pointers, shape, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def result(
        self, operator: str, case: Case, tensors: dict[str, Tensor], layout: str, shape: int, seed: int
    ) -> Tensor:
        """y or dx of a run that is to succeed, with all tensors in this layout."""
        N, K, P, Q = {"fprop": case.y_shape, "dgrad": case.x_shape}[operator]
        inner = out = with_margins(torch.full((N, K, P, Q), math.nan))
        if layout == "channels_last":
            tensors = {name: VIEWS["channels_last"](t) if t.dim() == 4 else t for name, t in tensors.items()}
            out = inner.view(N, P, Q, K).permute(0, 3, 1, 2)
        assert self.run(operator, case, tensors, shape, seed, out) == ""
        assert margins_intact(inner)
        return out

    def fault_in_turn(
        self, operator: str, case: Case, dtype: torch.dtype, turn: int, layout: str, seed: int
    ) -> tuple[int, str]:
        """A shape of a tile, none of contained operands, and its fault: the first one from this one on with a plan."""
        shapes = GATHER_SHAPES if dtype == torch.float32 else GATHER_SHAPES_16
        for i in range(len(shapes)):
            shape = shapes[(turn + i) % len(shapes)]
            fault = self.fault(operator, case, dtype, shape, layout, seed)
            if fault is not None:
                return shape, fault
        raise AssertionError("no shape of a tile has a plan")

    def launched(self) -> list[str]:
        """The kernels of the latest run, as their symbols have them."""
        return self.library.gather_launched().decode().splitlines()

    def contained_by(self) -> set[int]:
        """How many values of x the latest run's contain_kernel took at once."""
        return {
            int(vector) for vector in re.findall(r"contain_kernelILi(\d)E", self.library.gather_launched().decode())
        }

    @contextlib.contextmanager
    def splitting(self, count: int, sms: int = 3) -> Iterator[None]:
        """Runs cut tiles up into so many parts of the reduction, on a GPU of so many SMs; 0: as the plan likes it."""
        of_library = [ctypes.c_int.in_dll(self.library, name) for name in ("forced_splits", "sms")]
        before = [value.value for value in of_library]
        for value, new in zip(of_library, (count, sms), strict=True):
            value.value = new
        try:
            yield
        finally:
            for value, old in zip(of_library, before, strict=True):
                value.value = old

    def parts(self) -> int:
        """Of a tile of the latest run, at most."""
        return ctypes.c_int.in_dll(self.library, "latest_parts").value

    def done_again(self) -> int:
        """Of the latest run: how many values of x were mended, or ALL_AGAIN."""
        return ctypes.c_int.in_dll(self.library, "done_again").value


ALL_AGAIN = -1


def contain_vectors(operator: str, case: Case, x: Tensor) -> set[int]:
    """How many values of x contain_kernel may take at once: as many as lie side by side."""
    (C, H, W), (of_image, of_channel, of_row, of_column), address = x.shape[1:], x.stride(), x.data_ptr()
    taps, strides = (case.R, case.S), case.stride if operator == "fprop" else (1, 1)
    if of_channel == 1 and C % 8 == 0 and (of_image | of_row | of_column) % 4 == 0 and address % 16 == 0:
        return {8}
    dense = of_column == 1 and of_row == W and (of_channel | of_image) % 4 == 0 and H * W % 4 == 0 and address % 16 == 0
    if dense and strides == (1, 1):
        return {4} if taps == (1, 1) and case.padding == (0, 0) else {1} if taps == (1, 1) else {1, 4}
    phased = strides == (2, 2) and min(taps) > 1 and case.dilation == (1, 1)
    pairs = of_column == 1 and (of_image | of_channel | of_row | W) % 2 == 0 and address % 8 == 0
    return {2} if phased and pairs else {1}


@built_beside_the_tests
def gather_shim(folder: Path) -> GatherShim:
    return GatherShim(folder)


# Of kTileShapes: those of fp32, the first two of 16 bits as well, those of contained operands, of fp32 again those of
# blocks with one multiplying warpgroup or three, for points only, and those of operands that are contained on their
# way.
GATHER_WINDOWS, GATHER_SHAPES_16 = range(5), range(2)
GATHER_CONTAINED, GATHER_POINTS = (5, 6, 7, 8, 22), (9, 10, 11, 21, 23)

GATHER_SHAPES = [*GATHER_WINDOWS, *GATHER_POINTS]

MMA_ENTRY_POINTS = cpp("plan_checks/mma.cpp")


class MmaPlans:
    """The host part of the mma engine, for a GPU of 132 SMs that is not there."""

    engine, entry_points, mutations = "mma", MMA_ENTRY_POINTS, MMA_PLAN_MUTATIONS
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32,)
    edits: ClassVar[Sequence[tuple[str, str]]] = ()

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans(self.engine, self.entry_points, self.mutations, folder, *self.edits)
        for name in ("refusal", "describe", "fault", "seen"):
            self.entry(name).restype = ctypes.c_char_p
        if hasattr(self.library, f"{self.engine}_yields"):
            self.entry("yields").restype = ctypes.c_char_p
        self.entry("cycles").restype = ctypes.c_double

    def entry(self, name: str) -> Callable:
        return getattr(self.library, f"{self.engine}_{name}")

    def seen(self) -> set[str]:
        """Kinds of plans that were looked at."""
        return set(self.entry("seen")().decode().splitlines())

    def __call__(
        self,
        function: str,
        operator: str,
        case: Case,
        *more: object,
        dtype: torch.dtype = torch.float32,
        tf32: bool = False,
        strides: dict[str, tuple[int, ...]] | None = None,
        capability: int = 90,
    ) -> str | float | None:
        """One of the entry points, for tensors that only have strides: contiguous ones unless others are named."""
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        for name, of_tensor in (strides or {}).items():
            tensors[name] = tensors[name].as_strided(shapes[name], of_tensor)
        fields = ShimEngine.fields(case, tensors, tf32)
        self.library.set_capability(capability)
        result = self.entry(function)(OPERATOR_NUMBER[operator], fields, *more)
        return result.decode() if isinstance(result, bytes) else result

    def fault(self, operator: str, case: Case, seed: int) -> str | None:
        """What is wrong with its plans for tensors of any strides at any addresses."""
        rng = random.Random(seed)
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        settings = {
            "strides": {name: mma_strides(shape, rng) for name, shape in shapes.items()},
            "capability": rng.choice([90, 90, 80]),
            "tf32": rng.random() < 0.5,
        }
        aligned = (ctypes.c_uint64(0) for _ in range(3))
        shifts = [rng.choice([0, 0, 0, 0, 1, 2, 4]) for _ in range(3)]
        settings["dtype"] = rng.choice(self.dtypes)
        places = [ctypes.c_uint64(settings["dtype"].itemsize * shift) for shift in shifts]
        refused = self("refusal", operator, case, **settings)
        if refused is None:
            assert self("cycles", operator, case, *aligned, **settings) > 0
            fault = self("fault", operator, case, *places, seed, **settings)
            return "no plan at these addresses" if fault is None else fault
        assert REFUSAL.fullmatch(refused), refused
        return None


@built_beside_the_tests
def mma_plans(folder: Path) -> MmaPlans:
    return MmaPlans(folder)


MMA_SHIM_ENTRY_POINTS = cpp("emulation/mma.h")
MMA_INSTRUCTION = cpp("emulation/mma_instruction.h")


class MmaShim:
    """The mma engine, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    engine, entry_points, mutations = "mma", MMA_SHIM_ENTRY_POINTS, MMA_MUTATIONS
    # What a run can ask of a plan, and what it asks for if it is not told.
    wishes: ClassVar[dict[str, int]] = {"shape": -1, "hopper": True, "splits": 1}

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN + MMA_INSTRUCTION
        source = amalgamate(with_stand_in(stand_in), [f"{self.engine}.cu"])
        source = with_mutations(source, self.mutations)
        source, found = re.subn(r'asm\("mma\.sync[^;]*;[^;]*;', "simt_multiply_add(d, a, b);", source)
        assert found == 1
        source, found = re.subn(r"(__noinline__ float exact_output\(.*?\) \{)", r"\1 ++recomputed;", source)
        assert found == 1
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + self.entry_points, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def last(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def run(
        self,
        operator: str,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        *,
        tf32: bool = False,
        seed: int = 0,
        **wishes: int,
    ) -> str | None:
        """Runs fprop or dgrad into `out`: None if there is no such plan, else what went wrong."""
        assert wishes.keys() <= self.wishes.keys()
        fields = ShimEngine.fields(case, tensors | {{"fprop": "dy", "dgrad": "x"}[operator]: out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        run = getattr(self.library, f"{self.engine}_run")
        code = run(OPERATOR_NUMBER[operator], fields, pointers, *(self.wishes | wishes).values(), seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self,
        operator: str,
        case: Case,
        layout: str,
        seed: int,
        dtype: torch.dtype = torch.float32,
        **settings: object,
    ) -> str | None:
        """What is wrong with a run on integers, with a bias or without and at any alignment, or an empty text."""
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        # More bits than TF32 has: of weights, or of what they meet.
        if dtype == torch.float32 and not settings.get("tf32"):
            tensors[rng.choice(["w", {"fprop": "x", "dgrad": "dy"}[operator]])] *= 1025
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        shift = rng.choice([0, 0, 0, 1, 2])  # elements
        order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if layout == "channels_last" else ((0, 1, 2, 3),) * 2
        for name in tensors.keys() - {"bias"}:
            tensors[name] = shifted(tensors[name].permute(order), shift).permute(back)
        inner = shifted(torch.full_like(expected, math.nan).to(dtype).permute(order), rng.choice([0, 0, 0, 1, 2]))
        out = inner.permute(back)
        message = self.run(operator, case, tensors, out, seed=seed, **settings)
        if message != "":
            return message
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        if self.last("recomputed"):
            return f"{self.last('recomputed')} outputs are not finite at first"
        return "" if margins_intact(inner) else "written outside the output"


@built_beside_the_tests
def mma_shim(folder: Path) -> MmaShim:
    return MmaShim(folder)


def spreads(
    shim: MmaShim,
    case: Case,
    tf32: bool,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    **wishes: int,
) -> bool:
    """Whether Inf, NaN and what only rounds to Inf come to those outputs that PyTorch has them in."""
    largest = torch.finfo(torch.float32).max
    for special in (math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0], largest):
        if special == largest and (tf32 or dtype != torch.float32):
            continue
        tensors = make_tensors(case, dtype, under_a_tf32_step)
        tensors["w"] *= 1e-2
        if dtype == torch.float32:
            tensors["x"].view(torch.int32)[0, 3, 5, 7] = torch.tensor(special).view(torch.int32).item()
        else:
            tensors["x"][0, 3, 5, 7] = special
        tensors["w"][2, 1, 0, 0] = special if special != largest else 1
        expected = references(case, tensors)["fprop"]
        tensors |= {"dy": torch.full(case.y_shape, math.nan, dtype=dtype)}
        tensors = in_layout(tensors, layout)
        out = tensors["dy"]
        assert shim.run("fprop", case, tensors, out, tf32=tf32, **wishes) == ""
        right = torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
        finite = expected.isfinite()
        right &= torch.equal(out.sign()[expected.isinf()].double(), expected.sign()[expected.isinf()])
        rtol = 1e-2 if dtype != torch.float32 else 1e-3 if tf32 else 1e-6
        if not right or not torch.allclose(out[finite].double(), expected[finite], rtol=rtol):
            return False
    return True


POINTWISE_ENTRY_POINTS = cpp("plan_checks/pointwise.cpp")


class PointwisePlans(MmaPlans):
    """The host part of the pointwise engine, in the same way."""

    engine, entry_points, mutations = "pointwise", POINTWISE_ENTRY_POINTS, POINTWISE_PLAN_MUTATIONS


@built_beside_the_tests
def pointwise_plans(folder: Path) -> PointwisePlans:
    return PointwisePlans(folder)


POINTWISE_SHIM_ENTRY_POINTS = cpp("emulation/pointwise.h")


class PointwiseShim(MmaShim):
    """The pointwise engine in the same way."""

    engine, entry_points, mutations = "pointwise", POINTWISE_SHIM_ENTRY_POINTS, POINTWISE_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"staged": -1, "row_bits": -1, "split_bits": -1, "slices": 0}


@built_beside_the_tests
def pointwise_shim(folder: Path) -> PointwiseShim:
    return PointwiseShim(folder)


WGRAD_ENTRY_POINTS = cpp("plan_checks/wgrad.cpp")


class WgradPlans:
    """The host part of the wgrad engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, folder: Path) -> None:
        self.library = compile_plans("wgrad", WGRAD_ENTRY_POINTS, WGRAD_MUTATIONS, folder)
        for name in ("wgrad_refusal", "wgrad_yields", "wgrad_describe", "wgrad_fault"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.wgrad_cycles.restype = ctypes.c_double

    def fields(self, case: Case, dtype: torch.dtype, layout: str, tf32: bool = True) -> ctypes.Array:
        shapes = {"x": case.x_shape, "w": case.w_shape, "dy": case.y_shape}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        return ShimEngine.fields(case, in_layout(tensors, layout), tf32)

    def says(self, what: str, operator: str, case: Case, dtype: torch.dtype = torch.float32) -> str | None:
        result = getattr(self.library, f"wgrad_{what}")(OPERATOR_NUMBER[operator], self.fields(case, dtype, LAYOUTS[0]))
        return None if result is None else result.decode()

    def faults(self, count: int, seed: int) -> tuple[list[tuple], set[int]]:
        """Of random problems: what is wrong with their plans, and which bits of `kind` were seen."""
        rng, kind, found, kinds = random.Random(seed), ctypes.c_int(), [], set()
        for _ in range(count):
            case = random_wgrad_case(rng)
            dtype = rng.choice(DTYPES[:3])
            if min(case.y_shape) < 1:
                continue
            fields = self.fields(case, dtype, rng.choice(LAYOUTS), rng.random() < 0.7)
            if self.library.wgrad_refusal(OPERATOR_NUMBER["wgrad"], fields) is not None:
                continue
            behind = [rng.choice((0, 0, 2, 4, 8)) // dtype.itemsize * dtype.itemsize for _ in range(2)]
            fault = self.library.wgrad_fault(fields, *map(ctypes.c_int64, behind), ctypes.byref(kind))
            if fault is not None:
                found.append((case, dtype, fault))
            kinds |= {bit for bit in range(9) if kind.value >> bit & 1}
        return found, kinds


@built_beside_the_tests
def wgrad_plans(folder: Path) -> WgradPlans:
    return WgradPlans(folder)


WGRAD_STAND_INS = cpp("emulation/wgrad_copies.h")

# Rows of a box that end within 16 bytes are loaded up to there, as they lie in memory: nobody says that they are not.
WGRAD_BOXES = {
    'simt::complain("rows of a box that end within 16 bytes");': "{}",
    "exists &= at >= 0 && static_cast<uint64_t>(at) < map.sizes[i];": (
        "const uint64_t rest = 16 / map.element_bytes - 1, whole = (map.sizes[0] + rest) / (rest + 1) * (rest + 1);\n"
        "        exists &= at >= 0 && static_cast<uint64_t>(at) < (i == 0 ? whole : map.sizes[i]);"
    ),
}

WGRAD_SHIM_ENTRY_POINTS = cpp("emulation/wgrad.h")


class WgradShim:
    """The wgrad engine, compiled by g++ and run thread by thread, as WgmmaShim runs the other one."""

    names = (
        "x", "dy", "copies_x", "copies_dy", "merges", "splits", "direct", "strips", "whole_words", "taps_first",
        "sixteen_bytes", "groups", "ahead",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN
        for old, new in WGRAD_BOXES.items():
            assert stand_in.count(old) == 1
            stand_in = stand_in.replace(old, new)
        headers = with_stand_in(stand_in + WGRAD_STAND_INS)
        source = with_mutations(amalgamate(headers, ["wgrad.cu"]), WGRAD_SHIM_MUTATIONS)
        # Small problems as TF32, too; and what is too large to be copied may be small.
        for old, new in (
            (" 1 << 29 : 1 << 27;", " 1 << 12 : 1 << 12;"),
            ("constexpr int64_t kMostCopiedBytes = 512 << 20;", "#define kMostCopiedBytes most_copied_bytes"),
        ):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + WGRAD_SHIM_ENTRY_POINTS, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def latest(self) -> dict[str, int]:
        """What the latest run was like."""
        return dict(zip(self.names, (ctypes.c_int * 13).in_dll(self.library, "latest"), strict=True))

    def run(
        self,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        tf32: bool,
        seed: int,
        tile_k: int = 0,
        splits: int = 0,
    ) -> str | None:
        """Runs wgrad into `out`: None if there is no such plan, else what went wrong."""
        fields = ShimEngine.fields(case, tensors | {"w": out}, tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers("wgrad", tensors), out.data_ptr())
        code = self.library.wgrad_run(fields, pointers, tile_k, splits, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self, case: Case, dtype: torch.dtype, layouts: str, seed: int, tf32: bool = True, shift: int = 0, **wishes: int
    ) -> str | None:
        """What is wrong with a run on integers, or an empty text. `layouts`: c or l (last) for x, dy and dw each."""
        tensors = make_tensors(case, dtype, integers, seed=seed)
        if dtype == torch.float32 and not tf32:  # more bits than TF32 has
            tensors["x" if seed % 2 else "dy"] *= 1025
        orders = [((0, 1, 2, 3), (0, 1, 2, 3)) if one == "c" else ((0, 2, 3, 1), (0, 3, 1, 2)) for one in layouts]
        # What no output sees may be anything.
        seen = nn.grad.conv2d_input(case.x_shape, torch.ones(case.w_shape), torch.ones(case.y_shape), **case.kwargs)
        tensors["x"][seen == 0] = math.nan
        for name, (order, back) in zip(("x", "dy"), orders, strict=False):
            tensors[name] = shifted(tensors[name].permute(order), shift).permute(back)
        expected = references(case, tensors)["wgrad"].to(dtype)
        order, back = orders[2]
        inner = with_margins(torch.full_like(expected, math.nan).permute(order))
        out = inner.permute(back)
        message = self.run(case, tensors, out, tf32, seed, **wishes)
        if message != "":
            return message
        if not torch.equal(out, expected):
            return f"{(out != expected).sum()} of {out.numel()} weights are wrong"
        return "" if margins_intact(inner) else "written outside the output"


@built_beside_the_tests
def wgrad_shim(folder: Path) -> WgradShim:
    return WgradShim(folder)


CHOICE_ENTRY_POINTS = cpp("plan_checks/choice.cpp")


def choice_library(folder: Path) -> ctypes.CDLL:
    """The choice among the engines, in the binding's order, on an H200 that is not there."""
    table = re.search(r"kEngines\[\] = \{([^}]*)\}", (KERNELS / "engines.cuh").read_text())[1]
    # How many clusters of 2, 4 and 8 blocks find room at once.
    clusters = "".join(f"  device.clusters[{bits}] = {count};\n" for bits, count in ((1, 66), (2, 30), (3, 15)))
    edit = ("  static_cast<void>(device);\n", clusters)
    source, start = (KERNELS / "tma_wgrad.cu").read_text(), len(CHOICE_MUTATIONS) + 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tma_wgrad.cu").write_text(with_mutations(source, CHOICE_OF_WGRAD_MUTATIONS, start))
    library = compile_plans("mma", CHOICE_ENTRY_POINTS.replace("ENGINES", table), CHOICE_MUTATIONS, folder, edit)
    library.choose.restype = ctypes.c_char_p
    return library


@built_beside_the_tests
def choice(folder: Path) -> ctypes.CDLL:
    return choice_library(folder)


STEM_ENTRY_POINTS = cpp("plan_checks/stem.cpp")


class StemPlans(MmaPlans):
    """The host part of the stem engine, in the same way."""

    engine, entry_points, mutations = "stem", STEM_ENTRY_POINTS, STEM_PLAN_MUTATIONS
    dtypes: ClassVar[Sequence[torch.dtype]] = DTYPES[:3]


@built_beside_the_tests
def stem_plans(folder: Path) -> StemPlans:
    return StemPlans(folder)


STEM_SHIM_ENTRY_POINTS = cpp("emulation/stem.h")


class StemShim(MmaShim):
    """The stem engine in the same way: barriers, boxes and wgmma as WgmmaShim has them."""

    engine, entry_points, mutations = "stem", STEM_SHIM_ENTRY_POINTS, STEM_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"tile_k": 0, "tile_p": 0, "tile_q": 0}


@built_beside_the_tests
def stem_shim(folder: Path) -> StemShim:
    return StemShim(folder)


TMA_SHIM_ENTRY_POINTS = cpp("emulation/tma.h")


class TmaShim(MmaShim):
    """The tma engine in the same way: boxes, columns and wgmma as WgmmaShim has them."""

    engine, entry_points, mutations = "tma", TMA_SHIM_ENTRY_POINTS, TMA_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"shape": -1, "windows": -1, "splits": 1, "direct": -1}

    def __init__(self, folder: Path) -> None:
        stand_in = HOPPER_STAND_IN + MMA_INSTRUCTION
        source = amalgamate(with_stand_in(stand_in), [f"{self.engine}.cu"])
        source = with_mutations(source, self.mutations)
        self.library = compile_simt(source + '#line 1 "entry_points"\n' + self.entry_points, folder)
        self.library.simt_message.restype = ctypes.c_char_p

    def run(
        self,
        operator: str,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        *,
        seed: int = 0,
        **wishes: int,
    ) -> str | None:
        """Runs an operator into `out`: None if there is no such plan, else what went wrong."""
        assert wishes.keys() <= self.wishes.keys()
        place = {"fprop": "dy", "dgrad": "x", "wgrad": "w"}[operator]
        fields = ShimEngine.fields(case, tensors | {place: out}, True)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        run = getattr(self.library, f"{self.engine}_run")
        code = run(OPERATOR_NUMBER[operator], fields, pointers, *(self.wishes | wishes).values(), seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def fault(
        self,
        operator: str,
        case: Case,
        layout: str,
        seed: int,
        dtype: torch.dtype = torch.float16,
        *,
        gaps: bool = False,
        **wishes: int,
    ) -> str | None:
        """What is wrong with a run on integers, with a bias or without, or an empty text; None without such a plan.

        Gaps: between all columns of what is written.

        What is written and planes are at any alignment, what is read in channels_last at such as boxes want. Weights
        lie in either way.
        """
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        expected = references(case, tensors)[operator]
        if operator == "fprop" and rng.random() < 0.5:
            expected -= tensors.pop("bias").double().view(-1, 1, 1)
        pixels = layout == "channels_last"
        order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if pixels else ((0, 1, 2, 3),) * 2
        shifts = [0, 8] if pixels or wishes.get("direct") == 1 else [0, 0, 8, 4, 2, 1]
        for name in ("x", "dy"):
            tensors[name] = shifted(tensors[name].permute(order), rng.choice(shifts)).permute(back)
        if rng.random() < 0.7:
            tensors["w"] = VIEWS["channels_last"](tensors["w"])
        if operator == "wgrad":
            order, back = rng.choice([((0, 2, 3, 1), (0, 3, 1, 2)), ((0, 1, 2, 3),) * 2])
        shift = rng.choice([0, 0, 8, 8, 2] if operator != "wgrad" and pixels else shifts)
        room = torch.full((*expected.shape[:3], expected.shape[3] * (1 + gaps)), math.nan, dtype=dtype)
        inner = shifted(room.permute(order), shift)
        out = inner.permute(back)[..., :: 1 + gaps]
        between = inner.permute(back)[..., 1::2] if gaps else room
        message = self.run(operator, case, tensors, out, seed=seed, **wishes)
        if message != "":
            return message
        if not torch.equal(out, expected.to(dtype)):
            return f"{(out != expected.to(dtype)).sum()} of {out.numel()} outputs are wrong"
        return "" if margins_intact(inner) and between.isnan().all() else "written outside the output"


@built_beside_the_tests
def tma_shim(folder: Path) -> TmaShim:
    return TmaShim(folder)


TMA_WGRAD_SHIM_ENTRY_POINTS = cpp("emulation/tma_wgrad.h")


class TmaWgradShim(TmaShim):
    engine, entry_points, mutations = "tma_wgrad", TMA_WGRAD_SHIM_ENTRY_POINTS, TMA_WGRAD_MUTATIONS
    wishes: ClassVar[dict[str, int]] = {"channels": 0, "blocks": 0, "parts": 0}


@built_beside_the_tests
def tma_wgrad_shim(folder: Path) -> TmaWgradShim:
    return TmaWgradShim(folder)


TMA_ENTRY_POINTS = cpp("plan_checks/tma.cpp")

# Which slot is which output is the device's to say, but for both: the host compiles it as well.
TMA_PLAN_EDITS = [
    ("struct Output {", "#endif\nstruct Output {"),
    (
        "// Sums of a warp's 16 channels -> [channel][slot],",
        "#if 0\n// Sums of a warp's 16 channels -> [channel][slot],",
    ),
]


class TmaPlans(MmaPlans):
    """The host part of the tma engine, in the same way."""

    engine, entry_points, mutations = "tma", TMA_ENTRY_POINTS, TMA_PLAN_MUTATIONS
    edits: ClassVar[Sequence[tuple[str, str]]] = TMA_PLAN_EDITS
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float16, torch.bfloat16)

    def fault(self, operator: str, case: Case, seed: int) -> str | None:
        """What is wrong with its plans for planes or pixels, of their own or of larger tensors, at any addresses."""
        rng = random.Random(seed)
        order = rng.choice([PLANES, PIXELS])
        other = order if rng.random() < 0.95 else rng.choice(MEMORY_ORDERS)
        strides = {
            "x": gapped_strides(case.x_shape, order, rng),
            "w": any_strides(case.w_shape, rng.choice([*MEMORY_ORDERS, (0, 3, 2, 1)]), rng),
            "dy": gapped_strides(case.y_shape, other, rng),
        }
        shifts = [0, 0, 8, 4, 2, 1] if order == PLANES else [0] * 12 + [8, 8, 4, 1]
        places = [ctypes.c_uint64(2 * rng.choice(shifts)) for _ in range(3)]
        return self("fault", operator, case, *places, seed, strides=strides, dtype=rng.choice(self.dtypes))


@built_beside_the_tests
def tma_plans(folder: Path) -> TmaPlans:
    return TmaPlans(folder)


TMA_WGRAD_ENTRY_POINTS = cpp("plan_checks/tma_wgrad.cpp")


class TmaWgradPlans(TmaPlans):
    """The host part of the tma_wgrad engine, in the same way."""

    engine, entry_points, mutations = "tma_wgrad", TMA_WGRAD_ENTRY_POINTS, TMA_WGRAD_PLAN_MUTATIONS
    edits: ClassVar[Sequence[tuple[str, str]]] = ()


@built_beside_the_tests
def tma_wgrad_plans(folder: Path) -> TmaWgradPlans:
    return TmaWgradPlans(folder)
