"""The engines on the CPU, a library each: their planners (Planner) and their kernels (Emulated).

Names of both are those of kernels/; the session's fixtures are `<engine>_plans` and `<engine>_shim`, and `planner` and
`emulated` for tests of several engines.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
import random
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.cases import (
    CONTAINED_KINDS,
    DTYPE_NUMBER,
    DTYPES,
    LAYOUTS,
    MARKED_KINDS,
    OPERANDS,
    OPERATOR_NUMBER,
    Case,
    adverse_tensors,
    check_bounds,
    input_pointers,
    integers,
    is_channels_last,
    make_tensors,
    margins_intact,
    reference,
    shifted,
    under_a_tf32_step,
)
from tests.emulation import (
    HOPPER_STAND_IN,
    PROBLEM_FIELDS,
    SOURCES,
    amalgamate,
    built_beside_the_tests,
    compile_plans,
    compile_simt,
    cpp,
)
from tests.problems import MEMORY_ORDERS, PIXELS, PLANES, REFUSAL, any_strides, gapped_strides, mma_strides

# Changes a source before it is compiled: what the nightly tests leave out or shift.
Transform = Callable[[str], str]

SHAPES = {"x": "x_shape", "w": "w_shape", "dy": "y_shape"}
PLACES = {"fprop": "dy", "dgrad": "x", "wgrad": "w", "bgrad": "bias"}  # of results among the tensors
ORDERS = {"contiguous": ((0, 1, 2, 3),) * 2, "channels_last": ((0, 2, 3, 1), (0, 3, 1, 2))}  # there and back


def unchanged(source: str) -> str:
    return source


def meta_tensors(
    case: Case,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """x, w and dy that only have strides."""
    tensors = {}
    for name, shape in SHAPES.items():
        tensors[name] = torch.empty(getattr(case, shape), dtype=dtype, device="meta")
        if layout == "channels_last":
            tensors[name] = tensors[name].to(memory_format=torch.channels_last)
        if name in (strides or {}):
            tensors[name] = tensors[name].as_strided(tensors[name].shape, strides[name])
    return tensors


def problem_fields(case: Case, tensors: dict[str, Tensor], tf32: bool) -> ctypes.Array:
    x, w, y = tensors["x"], tensors["w"], tensors["dy"]
    values = [*case.x_shape, case.K, case.R, case.S, *case.y_shape[2:], case.groups]
    values += [*case.stride, *case.padding, *case.dilation, DTYPE_NUMBER[x.dtype], tf32]
    values += [*x.stride(), *w.stride(), *y.stride()]
    return (ctypes.c_int64 * len(PROBLEM_FIELDS))(*values)


class Engine:
    """What libraries of planners and of kernels have in common: refusals and descriptions."""

    engine: str
    library: ctypes.CDLL

    def select(self) -> None:
        """Of several engines in a library the one that is asked."""

    def ask(self, function: str, operator: str, case: Case, tensors: dict[str, Tensor], tf32: bool) -> str | None:
        self.select()
        answer = getattr(self.library, f"plan_{function}")
        answer.restype = ctypes.c_char_p
        text = answer(OPERATOR_NUMBER[operator], problem_fields(case, tensors, tf32))
        return None if text is None else text.decode()

    def refusal(
        self, operator: str, case: Case, *, tf32: bool = True, capability: int = 90, **of_tensors: object
    ) -> str | None:
        """Why it does not take a problem, for meta_tensors() of these settings."""
        if isinstance(self, Planner):
            self.library.set_capability(capability)
        text = self.ask("refusal", operator, case, meta_tensors(case, **of_tensors), tf32)
        assert text is None or REFUSAL.fullmatch(text), text
        return text

    def describes(self, operator: str, case: Case, *, tf32: bool = True, **of_tensors: object) -> str:
        return self.ask("describe", operator, case, meta_tensors(case, **of_tensors), tf32)


# Strides and addresses (in elements) of x, w and y at random, with other settings of a plan.
def anywhere(case: Case, rng: random.Random) -> tuple[dict, list[int]]:
    """Tensors of any strides, some expanded, on Hopper and not."""
    strides = {name: mma_strides(getattr(case, shape), rng) for name, shape in SHAPES.items()}
    settings = {"strides": strides, "capability": rng.choice([90, 90, 80]), "tf32": rng.random() < 0.5}
    return settings, [rng.choice([0, 0, 0, 0, 1, 2, 4]) for _ in range(3)]


def in_memory_orders(case: Case, rng: random.Random) -> tuple[dict, list[int]]:
    """Tensors of their own and parts of others; x and y more often than not in the same order."""
    order = rng.choice(MEMORY_ORDERS)
    other = rng.choice([order, rng.choice(MEMORY_ORDERS)])
    strides = {"x": any_strides(case.x_shape, order, rng), "dy": any_strides(case.y_shape, other, rng)}
    return {"strides": strides}, [rng.choice([0, 0, 0, 1, 2, 4, 8]) for _ in range(3)]


def planes_or_pixels(case: Case, rng: random.Random) -> tuple[dict, list[int]]:
    """Tensors of their own, or with gaps behind pixels, rows, planes or images."""
    order = rng.choice([PLANES, PIXELS])
    other = order if rng.random() < 0.95 else rng.choice(MEMORY_ORDERS)
    strides = {
        "x": gapped_strides(case.x_shape, order, rng),
        "w": any_strides(case.w_shape, rng.choice([*MEMORY_ORDERS, (0, 3, 2, 1)]), rng),
        "dy": gapped_strides(case.y_shape, other, rng),
    }
    shifts = [0, 0, 8, 4, 2, 1] if order == PLANES else [0] * 12 + [8, 8, 4, 1]
    return {"strides": strides}, [rng.choice(shifts) for _ in range(3)]


def dense(case: Case, rng: random.Random) -> tuple[dict, list[int]]:
    settings = {"layout": rng.choice([*LAYOUTS, "contiguous"]), "tf32": rng.random() < 0.7}
    return settings, [rng.choice([0, 0, 1, 2, 4]) for _ in range(3)]


@dataclasses.dataclass(frozen=True)
class Planned:
    """How a planner is checked: for which types, and tensors of which kind."""

    dtypes: Sequence[torch.dtype]
    tensors: Callable[[Case, random.Random], tuple[dict, list[int]]]
    edits: Sequence[tuple[str, str]] = ()


# Which slot is which output is the device's to say, but for tma's planner: the host compiles it as well.
TMA_EDITS = [
    ("struct Output {", "#endif\nstruct Output {"),
    ("// Stages sums of a warp's 16 channels", "#if 0\n// Stages sums of a warp's 16 channels"),
]
PLANNED = {
    "gather": Planned(DTYPES[:3], in_memory_orders),
    "hopper_wgrad": Planned(DTYPES[:3], in_memory_orders),
    "tma_wgrad": Planned(DTYPES[1:3], planes_or_pixels),
    "mma": Planned(DTYPES[:1], anywhere),
    "pointwise": Planned(DTYPES[:1], anywhere),
    "stem": Planned(DTYPES[:3], anywhere),
    "tma": Planned(DTYPES[1:3], planes_or_pixels, TMA_EDITS),
    "wgmma": Planned(DTYPES[:3], dense),
}


class Planner(Engine):
    """The host part of an engine, for a GPU of 132 SMs that is not there."""

    def __init__(self, engine: str, folder: Path, transform: Transform = unchanged) -> None:
        self.engine, self.planned = engine, PLANNED[engine]
        checks = f'#line 1 "plan_checks/{engine}.cpp"\n{cpp(f"plan_checks/{engine}.cpp")}'
        self.library = compile_plans(engine, checks, folder, *self.planned.edits, transform=transform)
        self.library.plan_fault.restype = self.library.plan_unseen.restype = ctypes.c_char_p
        self.library.plan_cycles.restype = ctypes.c_double

    def unseen(self) -> str:
        """Conditions that all plans so far have met, or none of them: see NOTE in planner.h."""
        return self.library.plan_unseen().decode()

    def cycles(self, operator: str, case: Case, *, tf32: bool = True, **of_tensors: object) -> float:
        """The estimate for tensors at aligned addresses, 0 without a plan."""
        self.library.set_capability(90)
        fields = problem_fields(case, meta_tensors(case, **of_tensors), tf32)
        return self.library.plan_cycles(OPERATOR_NUMBER[operator], fields)

    def fault(self, operator: str, case: Case, seed: int, dtype: torch.dtype | None = None) -> str | None:
        """What is wrong with its plans for tensors at random, or an empty text; None if there is no plan."""
        rng = random.Random(seed)
        settings, shifts = self.planned.tensors(case, rng)
        settings["dtype"] = dtype or rng.choice(self.planned.dtypes)
        if self.engine != "gather" and self.refusal(operator, case, **settings) is not None:
            return None
        self.library.set_capability(settings.pop("capability", 90))
        fields = problem_fields(case, meta_tensors(case, **{k: v for k, v in settings.items() if k != "tf32"}),
                                settings.get("tf32", True))  # fmt: skip
        places = [ctypes.c_uint64(settings["dtype"].itemsize * shift) for shift in shifts]
        fault = self.library.plan_fault(OPERATOR_NUMBER[operator], fields, *places, seed)
        return None if fault is None else fault.decode()


# Headers that a Kernels' `hopper` takes the place of, besides ptx.cuh.
STOOD_IN_FOR = ("async_copy.cuh", "cluster.cuh", "im2col_map.cuh", "tensor_map.cuh", "wgmma.cuh", "wgmma_forms.cuh")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """How an engine's kernels are compiled for the CPU, and where operands of a run may lie in memory."""

    files: Sequence[str]  # under kernels/
    entry_points: Sequence[str]  # under emulation/
    hopper: str = HOPPER_STAND_IN  # in place of ptx.cuh and of the headers that build on it
    edits: Mapping[str, str] = dataclasses.field(default_factory=dict)  # patterns that are there once
    wishes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # and what a run asks for if it is not told
    tf32: bool = True  # unless a run says otherwise
    shifts: Mapping[str, Sequence[int]] = dataclasses.field(  # elements behind aligned addresses
        default_factory=lambda: dict.fromkeys((*LAYOUTS, "out in channels_last"), (0, 0, 0, 1, 2))
    )


COPIES, INSTRUCTION = cpp("emulation/copies.h"), cpp("emulation/mma_instruction.h")
# TF32 holds for problems that are small enough for the CPU.
SMALL_TF32 = {r"\b1 << 29 : 1 << 27;": "1 << 20 : 1 << 20;"}
SMALL_TF32 |= {rf"\bleast = 1 << {bits};": "least = 1 << 20;" for bits in (24, 29)}
MMA_EDITS = {
    r'asm\("mma\.sync[^;]*;[^;]*;': "simt_multiply_add(d, a, b);",
    r"(__noinline__ float exact_output\(.*?\) \{)": r"\1 ++recomputed;",
}
MMA_WGRAD_EDITS = {
    rf'asm\("mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{name}[^;]*;[^;]*;': f"simt_multiply_add(d, a, b, {of}{{}});"
    for name, of in (("f16", "Half"), ("bf16", "BFloat16"))
} | {r'asm\("mma\.sync[^;]*;[^;]*;': "simt_multiply_add(d, a, b);", r" 1 << 29 : 1 << 27;": " 1 << 12 : 1 << 12;"}
GATHER_EDITS = {
    r'asm volatile\("st\.shared\.v4[^;]*;[^;]*;': (
        "simt::check_shared(address, 16); const uint32_t words[4] = {a, b, c, d}; "
        "std::memcpy(simt::smem + address, words, 16);"
    ),
    r"run<BFloat16>\(": "run<Half>(",  # the same code
}


def replaced(text: str, edits: Mapping[str, str]) -> str:
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def by_mma(engine: str, edits: Mapping[str, str] = MMA_EDITS, **wishes: int) -> Kernels:
    return Kernels([f"{engine}.cu"], [f"{engine}.h"], HOPPER_STAND_IN + INSTRUCTION, edits, wishes, tf32=False)


def by_tma(engine: str, **wishes: int) -> Kernels:
    shifts = {"contiguous": (0, 0, 8, 4, 2, 1), "channels_last": (0, 8), "out in channels_last": (0, 0, 8, 8, 2)}
    edits = {r"return run<BFloat16>\(pointers.w": "return run<Half>(pointers.w"} if engine == "tma" else {}
    return Kernels([f"{engine}.cu"], [f"{engine}.h"], HOPPER_STAND_IN + INSTRUCTION, edits, wishes, shifts=shifts)


# Limits that tests may lower, for small problems to exceed them.
LIMITS = {
    rf"constexpr int64_t ({name}) = (\w+);": (r'extern "C" { int64_t limit_\1 = \2; } static int64_t& \1 = limit_\1;')
    for name in ("kMostBlocks", "kWeightGradBlocks", "kDepthwiseWgradBlocks", "kMostDenseBytes", "kMostSpreadValues")
}
# direct and the engines that give it parts, in one library.
PARTS = ("direct", "dilated", "patches", "strided")
WITH_PARTS = Kernels(
    [f"{engine}.cu" for engine in PARTS],
    ["engine.h", "parts.h"],
    HOPPER_STAND_IN,
    SMALL_TF32 | LIMITS | {r"kLeastPoints = 1 << 17;": "kLeastPoints = 1;", r"kLeastTiles = 16,": "kLeastTiles = 1,"},
)
EMULATED = {
    **dict.fromkeys(PARTS, WITH_PARTS),
    # On a GPU as small as this, a thread of dgrad_any_kernel has several rows.
    "depthwise": Kernels(["depthwise.cu"], ["engine.h", "depthwise.h"], edits=SMALL_TF32 | {r": 16, sms": ": 1, 1"}),
    "mma": by_mma("mma", shape=-1, hopper=1, splits=1),
    "mma_wgrad": by_mma("mma_wgrad", MMA_WGRAD_EDITS, images=0, tile_p=0, tile_q=0, splits=0),
    "pointwise": by_mma("pointwise", staged=-1, row_bits=-1, split_bits=-1, slices=0),
    "stem": by_mma("stem", tile_k=0, tile_p=0, tile_q=0),
    "tma": by_tma("tma", shape=-1, windows=-1, splits=1, direct=-1),
    "tma_wgrad": dataclasses.replace(
        by_tma("tma_wgrad", channels=0, blocks=0, parts=0),
        # hopper_wgrad computes what does not fit into scaled fp16.
        files=["tma_wgrad.cu", "planes_copy.cu", "hopper_wgrad.cu"],
        edits={r" 1 << 29 : 1 << 27;": " 1 << 12 : 1 << 12;"},
    ),
    "hopper_wgrad": Kernels(
        ["hopper_wgrad.cu", "planes_copy.cu"],
        ["hopper_wgrad.h"],
        edits={
            r" 1 << 29 : 1 << 27;": " 1 << 12 : 1 << 12;",
            r"kMostCopiedBytes = 1 << 30;": "kMostCopiedBytes = 70000;",
        },
        wishes={"shape": -1, "channels": 0, "parts": 0, "images": 0, "rows": 0, "columns": 0}
        | {"contains": 1, "rounds": -1, "fold": -1},
    ),
    "wgmma": Kernels(
        ["wgmma.cu", "listed.cu"],
        ["wgmma.h"],
        edits={r"return run<(Stacked)?Bf16>\(": r"return run<\1Fp16>("},  # the same code
        wishes={"configuration": -1},
    ),
    "gather": Kernels(
        ["gather.cu", "tma.cu"],  # which multiplies some contained operands
        ["gather.h"],
        HOPPER_STAND_IN + INSTRUCTION,
        GATHER_EDITS,
        {"shape": -1, "splits": 0, "sms": 3, "images": 0, "windows": -1, "tma_splits": 1},
    ),
}
# Functions of other units, by the unit that calls them.
OTHER_UNITS = {"wgmma.cu": cpp("emulation/listed.h")}
OTHER_UNITS |= dict.fromkeys(("hopper_wgrad.cu", "tma_wgrad.cu"), cpp("emulation/planes_copy.h"))


def arranged(tensor: Tensor, layout: str, shift: int) -> Tensor:
    """A copy in this order that begins so many elements behind an aligned address, NaN around it."""
    order, back = ORDERS[layout]
    return shifted(tensor.permute(order), shift).permute(back)


class Emulated(Engine):
    """An engine's kernels, compiled by g++ and run thread by thread: roles, barriers, copies, the matrix instruction.

    What a GPU orders less strictly than this (memory as other threads see it, the asynchronous proxy) it does not show.
    """

    def __init__(self, engine: str, folder: Path, transform: Transform = unchanged) -> None:
        self.engine, self.kernels = engine, EMULATED[engine]
        headers = {"ptx.cuh": self.kernels.hopper, **dict.fromkeys(STOOD_IN_FOR, "")}
        source = amalgamate(SOURCES | headers, self.kernels.files)
        for pattern, replacement in self.kernels.edits.items():
            source, found = re.subn(pattern, replacement, source)
            assert found >= 1, pattern
        engines = PARTS if engine in PARTS else (engine,)
        self.number = engines.index(engine)
        table = ", ".join(f"&modelnew::k{name.capitalize()}Engine" for name in engines)
        source = f"#define ENGINES {table}\n{transform(source)}"
        entry_points = "".join(cpp(f"emulation/{name}") for name in self.kernels.entry_points)
        self.library = compile_simt(f'{source}#line 1 "entry_points"\n{entry_points}', folder)
        self.library.simt_message.restype = self.library.simt_launched.restype = ctypes.c_char_p

    def select(self) -> None:
        if self.engine in PARTS:
            self.set("engine_number", self.number)

    def last(self, name: str) -> int:
        """What the library says of its latest run."""
        return ctypes.c_int.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def launched(self) -> list[str]:
        """Kernels of the latest run, or of all so far, as their symbols have them."""
        return self.library.simt_launched().decode().splitlines()

    def run(
        self,
        operator: str,
        case: Case,
        tensors: dict[str, Tensor],
        out: Tensor,
        *,
        tf32: bool | None = None,
        seed: int = 0,
        **wishes: int,
    ) -> str | None:
        """Runs an operator into `out`: None if there is no such plan, else what went wrong.

        At odd seeds what is asynchronous happens as late as it may.
        """
        assert wishes.keys() <= self.kernels.wishes.keys()
        self.select()
        strided = tensors if operator == "bgrad" else tensors | {PLACES[operator]: out}
        fields = problem_fields(case, strided, self.kernels.tf32 if tf32 is None else tf32)
        pointers = (ctypes.c_void_p * 5)(*input_pointers(operator, tensors), out.data_ptr())
        wanted = (ctypes.c_int * 9)(*(self.kernels.wishes | wishes).values())
        code = self.library.run_wished(OPERATOR_NUMBER[operator], fields, pointers, wanted, seed)
        if code == -1:
            return None
        return "" if code == 0 else f"error {code}, {self.library.simt_message().decode()}"

    def result(
        self, operator: str, case: Case, tensors: dict[str, Tensor], layout: str = "contiguous", **settings: object
    ) -> Tensor:
        """What a run that is to succeed gives, with x, dy and what is written in this layout."""
        tensors = tensors | {name: arranged(tensors[name], layout, 0) for name in ("x", "dy") if name in tensors}
        shape = (case.K,) if operator == "bgrad" else getattr(case, SHAPES[PLACES[operator]])
        order, back = ORDERS[layout] if len(shape) == 4 else ((0,), (0,))
        inner = shifted(tensors["w"].new_full(shape, math.nan).permute(order), 0)
        message = self.run(operator, case, tensors, inner.permute(back), **settings)
        assert message == "", f"{operator} of {case}, {layout}, {settings}: {message}"
        assert margins_intact(inner), f"{operator} of {case} writes outside its output"
        return inner.permute(back)

    def __call__(self, case: Case, tensors: dict[str, Tensor], tf32: bool = False) -> dict[str, Tensor]:
        """The operators that the engine takes, into outputs filled with NaN, in the layout of x and dy."""
        results = {}
        layout = "channels_last" if any(is_channels_last(tensors[name]) for name in ("x", "dy")) else "contiguous"
        for operator in OPERATOR_NUMBER:
            place = PLACES[operator]
            out = tensors["x"].new_full((case.K,) if operator == "bgrad" else tensors[place].shape, math.nan)
            own = layout if operator in ("fprop", "dgrad") else "contiguous"
            order, back = ORDERS[own] if operator != "bgrad" else ((0,), (0,))
            inner = shifted(out.permute(order), 0)
            message = self.run(operator, case, tensors, inner.permute(back), tf32=tf32)
            assert message in (None, ""), f"{operator} of {case}: {message}"
            assert margins_intact(inner), f"{operator} of {case} writes outside its output"
            if message == "":
                results[operator] = inner.permute(back)
        return results

    def fault(
        self,
        operator: str,
        case: Case,
        layout: str | tuple[str, str, str],
        seed: int,
        dtype: torch.dtype = torch.float32,
        *,
        tf32: bool | None = None,
        shift: int | None = None,
        gaps: bool = False,
        **wishes: int,
    ) -> str | None:
        """What is wrong with a run on integers, with a bias or without, or an empty text; None without such a plan.

        `layout` is that of x, dy and what is written, or of each; all begin `shift` elements behind aligned addresses,
        or anywhere. With gaps every other column of what is written belongs to something else.
        """
        rng = random.Random(seed)
        tensors = make_tensors(case, dtype, integers, seed=seed)
        if dtype == torch.float32 and not (self.kernels.tf32 if tf32 is None else tf32):  # more bits than TF32 has
            tensors[rng.choice(OPERANDS[operator])] *= 1025
        if operator == "fprop" and rng.random() < 0.5:
            del tensors["bias"]
        plain = {**tensors}
        if self.engine == "hopper_wgrad":  # what no output sees may be anything
            seen = nn.grad.conv2d_input(case.x_shape, torch.ones(case.w_shape), torch.ones(case.y_shape), **case.kwargs)
            tensors["x"] = tensors["x"].masked_fill(seen == 0, math.nan)
        of_x, of_dy, of_out = (layout,) * 3 if isinstance(layout, str) else layout
        if operator == "wgrad" and isinstance(layout, str):
            of_out = rng.choice(LAYOUTS)

        def at(of: str) -> int:
            return rng.choice(self.kernels.shifts[of]) if shift is None else shift

        for name, of in (("x", of_x), ("dy", of_dy), ("w", rng.choice(LAYOUTS))):
            tensors[name] = arranged(tensors[name], of, at(of))
        order, back = ORDERS[of_out]
        *shape, columns = getattr(case, SHAPES[PLACES[operator]])
        room = torch.full((*shape, columns * (1 + gaps)), math.nan, dtype=dtype)
        inner = shifted(room.permute(order), at(f"out in {of_out}" if of_out == "channels_last" else of_out))
        whole = inner.permute(back)
        out = whole[..., :: 1 + gaps]
        message = self.run(operator, case, tensors, out, tf32=tf32, seed=seed, **wishes)
        if message != "":
            return message
        expected = reference(operator, case, plain).to(dtype)
        if not torch.equal(out, expected):
            return f"{(out != expected).sum()} of {out.numel()} outputs are wrong"
        again = self.last("done_again" if self.engine == "gather" else "recomputed")
        if again:
            return f"{again} values do not fit, or outputs are not finite at first"
        untouched = margins_intact(inner) and (not gaps or whole[..., 1::2].isnan().all())
        return "" if untouched else "written outside the output"


# Types of operands, and whether TF32 is allowed.
FP32, TF32, FP16, BF16 = (torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, True)


def settings_of(*contracts: tuple[torch.dtype, bool], **wishes: Sequence[int]) -> list[dict[str, object]]:
    """All combinations, as keyword arguments of Emulated.fault()."""
    return [
        {"dtype": dtype, "tf32": tf32} | dict(zip(wishes, values, strict=True))
        for (dtype, tf32), *values in itertools.product(contracts, *wishes.values())
    ]


def of_operator(operator: str, cases: Iterable[Case]) -> list[tuple[Case, str]]:
    return [(case, operator) for case in cases]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Problems that run on integers so many times each, with settings and layouts that take turns."""

    cases: Sequence[tuple[Case, str]]
    turns: int
    settings: Sequence[Mapping[str, object]]
    ways: Mapping[str, set[int]] = dataclasses.field(default_factory=dict)  # values of the library's variables
    layouts: Sequence[str | tuple[str, str, str]] = (*LAYOUTS,)
    kernels: Sequence[str] = ()  # parts of their symbols
    name: str = ""

    def __str__(self) -> str:
        return self.name

    def check(self, emulated: Emulated) -> None:
        """Results are exact; every setting runs at least once, and so does every way and kernel that is named."""
        seen = {name: set() for name in self.ways}
        launched = set()
        waiting = random.Random(0).sample(self.settings, len(self.settings))
        never = [*waiting]
        for turn, (case, operator) in enumerate(case for case in self.cases for _ in range(self.turns)):
            layout, seed = self.layouts[turn % len(self.layouts)], 2 * turn + turn // 2 % 2
            for settings in waiting:  # the first one that there is a plan of
                fault = emulated.fault(operator, case, seed=seed, **{"layout": layout} | settings)
                if fault is not None:
                    break
            assert fault == "", f"{operator} of {case}, {layout}, {settings}, seed {seed}: {fault}"
            waiting.append(waiting.pop(waiting.index(settings)))
            never = [one for one in never if one is not settings]
            launched |= {*emulated.launched()} if self.kernels else set()
            for name, values in seen.items():
                values.add(emulated.last(name))
        assert not never, never
        assert all(seen[name] >= values for name, values in self.ways.items()), seen
        assert all(any(part in symbol for symbol in launched) for part in self.kernels), launched


def spreads(
    shim: Emulated,
    case: Case,
    tf32: bool,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    operator: str = "fprop",
    **wishes: int,
) -> bool:
    """Whether Inf, NaN and what only rounds to Inf come to those outputs that PyTorch has them in."""
    largest = torch.finfo(torch.float32).max
    for special in (math.inf, -math.inf, struct.unpack("f", b"\xff\xff\xff\x7f")[0], largest):
        if special == largest and (tf32 or dtype != torch.float32):
            continue
        tensors = make_tensors(case, dtype, under_a_tf32_step)
        first, second = (tensors[name] for name in OPERANDS[operator])
        second *= 1e-2
        if dtype == torch.float32:
            first.view(torch.int32)[0, 3, 5, 7] = torch.tensor(special).view(torch.int32).item()
        else:
            first[0, 3, 5, 7] = special
        if operator != "dgrad":  # whose zeros around dy may be factors of w
            second[-1, 1, 0, 0] = special if special != largest else 1
        expected = reference(operator, case, tensors)
        out = shim.result(operator, case, tensors, layout, tf32=tf32, **wishes)
        right = torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
        finite = expected.isfinite()
        right &= torch.equal(out.sign()[expected.isinf()].double(), expected.sign()[expected.isinf()])
        rtol = 1e-2 if dtype != torch.float32 else 1e-3 if tf32 else 1e-5
        if not right or not torch.allclose(out[finite].double(), expected[finite], rtol=rtol):
            return False
    return True


def check_adverse(
    shim: Emulated, operator: str, case: Case, kind: str, layout: str = "contiguous", tf32: bool = True, **settings: int
) -> None:
    """Within the contract, whatever the data; what does not fit into fp16 is done again, and little else."""
    tensors = adverse_tensors(case, kind, operator)
    out = shim.result(operator, case, tensors, layout, tf32=tf32, **settings)
    check_bounds(case, {operator: out}, tensors, tf32={operator} if tf32 else ())
    done, everything = shim.last("done_again"), GATHER_ALL_AGAIN
    if shim.engine == "wgmma":
        everything = shim.last("of_tiles")
    if kind in CONTAINED_KINDS:
        assert done == 0
    elif kind in MARKED_KINDS:
        assert done != 0  # the sample of tensors as small as these sees some of them, and takes another scale
    else:
        assert done == everything or (shim.engine, kind) == ("gather", "faint channel")


# Shapes of gather's tiles, by their numbers in kTileShapes: those of fp32, of windows or of points alone (with one
# multiplying warpgroup or three), the first two of 16 bits as well; those of contained operands, of a copy or contained
# on their way; behind them the shapes by which tma multiplies such a copy.
GATHER_WINDOWS, GATHER_SHAPES_16 = range(5), range(2)
GATHER_CONTAINED, GATHER_POINTS = (5, 6, 7, 8, 22), (9, 10, 11, 21, 23)
GATHER_SHAPES = [*GATHER_WINDOWS, *GATHER_POINTS]
GATHER_LANDING, GATHER_STACKED, GATHER_BY_TMA = range(12, 21), 24, range(25, 36)
GATHER_ALL_AGAIN = -1

WGMMA_SPLIT_CONFIGURATIONS = {64, 65, 66, 68, 69, 70, 72, 76, 81}


def build_choice(folder: Path) -> ctypes.CDLL:
    """The choice among the engines, on an H200 that is not there."""
    # How many clusters of 2, 4 and 8 blocks find room at once.
    clusters = "".join(f"  device.clusters[{bits}] = {count};\n" for bits, count in ((1, 66), (2, 30), (3, 15)))
    edit = ("  static_cast<void>(device);\n", clusters)
    library = compile_plans("mma", cpp("plan_checks/choice.cpp"), folder, edit)
    library.choose.restype = ctypes.c_char_p
    return library


choice = built_beside_the_tests("choice", build_choice)
for _engine in PLANNED:
    globals()[f"{_engine}_plans"] = built_beside_the_tests(f"{_engine}_plans", functools.partial(Planner, _engine))
for _engine in EMULATED:
    _build, _folder = functools.partial(Emulated, _engine), "parts" if _engine in PARTS else None
    globals()[f"{_engine}_shim"] = built_beside_the_tests(f"{_engine}_shim", _build, _folder)


@pytest.fixture
def planner(request: pytest.FixtureRequest, builds: dict[str, Future]) -> Planner:
    """That of the engine which a test is parametrised with, indirectly."""
    return builds[f"{request.param}_plans"].result()


@pytest.fixture
def emulated(request: pytest.FixtureRequest, builds: dict[str, Future]) -> Emulated:
    return builds[f"{request.param}_shim"].result()
