"""Generic mutants of an amalgamated CUDA text: where one can take place, and a text in which all wait for a switch.

A mutant leaves a synchronisation out, adds one to a number, an index or a bound, takes a condition for true, or changes
the sign of a term. All are insertions, so that one library has them all and `simt_mutation` says which takes place.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping

# Calls of these names may be left out, if they are statements.
SYNCHRONISATION = re.compile(
    r"(?:\w+(?:::|\.))*\w*(?:(?<!a)sync(?:threads|warp)?|barrier\w*|wait\w*|arrive\w*|commit|meet)\s*(?:<[^;(){}]*>)?\("
)
# But not these, whose absence cannot show on the CPU.
UNSEEN = {
    r"fence_async\w*|__threadfence|wgmma_fence": "order memory for a proxy or another SM; the emulation has one memory",
    r"wgmma_settle|registers_\w+|prefetch\w*": "are for the compiler, or for speed",
    r"launch_dependents|wait_for_prerequisites|wait_for_\w*operands": "order kernels, which run one by one",
    r"cluster_leave|wait_for_count": "order blocks, which run one by one",
}
UNSEEN_CALL = re.compile(rf"(?:\w+::)*(?:{'|'.join(UNSEEN)})\b")

# Text in which nothing changes, up to the end of the bracket: assembly, which stand-ins replace, and what is constant.
FIXED = re.compile(r"\b(?:asm|asm volatile|static_assert|if constexpr|sizeof|alignas)\s*\(")
# And up to the end of each: what must be known to the compiler, and masks of lanes, of which the emulation takes all.
FIXED_TEXT = re.compile(
    r"(?<!\w)constexpr\b(?!\s*\()[^;{]*|\bcase\s+[^:?]*:|\b(?:using|extern|static)\s[^;]*;|\b__\w+_sync\([^,()]*,"
)
TEMPLATE_ARGUMENTS = re.compile(r"(?<=\w)<(?=[\w(:~!])")  # an operator has blanks around it
NUMBER = re.compile(r"(?<![\w.'])(?:0x[0-9a-fA-F]+|\d+)[uUlL]{0,3}(?![\w.'])")
# Where buffers lie and how large they are: host and device agree on it, and more room than needed is no mistake.
LAYOUT = re.compile(r"\b\w*(?:layout|bytes)\(")
DEVICE = re.compile(r"\b(?:__device__|__global__|MODELNEW_HOST_DEVICE)\b")
HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*',
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Site:
    """A mutant: its place in the text, and what is inserted before it and, where there is an end, behind that."""

    kind: str
    file: str
    line: int
    text: str
    rank: str
    begin: int
    before: str
    end: int | None = None
    behind: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind} [{self.before}..{self.behind}]: {self.text}"


def blank(found: re.Match) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def matching(text: str, start: int) -> int:
    """Where the bracket at `start` is closed."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return len(text)


def end_of_operand(text: str, start: int) -> int:
    """Where the right side of a comparison ends."""
    place = start
    while place < len(text) and text[place] not in ")]},;?" and not text.startswith((" && ", " || ", " : "), place):
        place = matching(text, place) + 1 if text[place] in "([{" else place + 1
    return start + len(text[start:place].rstrip())


def device_bodies(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of the bodies of functions for the device, but for layouts and what compilers evaluate."""
    end = 0
    for found in DEVICE.finditer(text):
        if found.start() < end:
            continue
        place = found.end()
        while place < len(text) and text[place] not in "{;":
            place = matching(text, place) + 1 if text[place] == "(" else place + 1
        head = text[max(text.rfind(stop, 0, found.start()) for stop in ";{}") + 1 : place]
        if text[place : place + 1] == "{":
            end = matching(text, place)
            if not re.search(r"\bconstexpr\b", head) and not LAYOUT.search(head):
                yield place, end


def changeable(body: str) -> str:
    """A body with NUL where nothing may change."""
    ranges = [found.span() for found in FIXED_TEXT.finditer(body)]
    ranges += [(found.start(), matching(body, found.end() - 1)) for found in FIXED.finditer(body)]
    for found in TEMPLATE_ARGUMENTS.finditer(body):
        depth, place = 0, found.start()
        while place < len(body) and body[place] not in ";{}":
            depth += (body[place] == "<") - (body[place] == ">")
            place += 1
            if depth == 0:
                ranges.append((found.start(), place))
                break
    for start, end in ranges:
        body = body[:start] + "\0" * (end - start) + body[end:]
    return body


def declares(body: str, bracket: int) -> bool:
    """Whether a [ belongs to the declaration of an array: a type and a blank precede the name, or a comma does."""
    while body[bracket - 1] == "]":
        bracket = body.rindex("[", 0, bracket)
    before = re.search(r"(\w+|>|[&*])\s+[&*]?\w+$|,\s*\w+$", body[:bracket][-80:])
    if before is None:
        return False
    if before[1] is None:  # of a list of declarations, or of arguments
        statement = body[max(body.rfind(stop, 0, bracket) for stop in ";{}") + 1 : bracket]
        return statement.count("(") == statement.count(")")
    return before[1] not in ("return", "else", "&", "*") and not before[1].isdigit()


def changes(body: str) -> Iterator[tuple[str, int, str, int | None, str]]:
    """Every mutant of a function's body: its kind, and what is inserted where."""
    free = changeable(body)
    for start in re.finditer(r"(?:[;{})]|\belse|\bdo)\s+(?=[\w:])", body):
        call = SYNCHRONISATION.match(body, start.end())
        end = matching(body, call.end() - 1) + 2 if call else 0
        if body[end - 2 : end] == ");" and not UNSEEN_CALL.match(body, start.end()):
            yield "left out", start.end(), "{ if (!simt_at(NUMBER)) ", end, " }"
    for number in NUMBER.finditer(free):
        yield "one more", number.start(), "(", number.end(), " + simt_at(NUMBER))"
    for bound in re.finditer(r" (?:<|<=|>|>=) (?=[^\s\0])", free):
        end = end_of_operand(body, bound.end())
        if not NUMBER.fullmatch(body, bound.end(), end):  # a mutant of its own
            yield "one more", bound.end(), "((", end, ") + simt_at(NUMBER))"
    for subscript in re.finditer(r"[\w\])]\[(?=[^\[\]\0]*\w)", free):
        begin = subscript.end()
        end = matching(body, begin - 1)
        if not declares(body, begin - 1) and not NUMBER.fullmatch(body, begin, end):
            yield "one more", begin, "(", end, ") + simt_at(NUMBER)"
    for condition in re.finditer(r"\bif \((?=[^;\0])", free):
        yield "always", condition.end(), "simt_at(NUMBER) || (", matching(body, condition.end() - 1), ")"
    for sign in re.finditer(r"(?<=[\w)\]]) [+-] (?=[\w(])", free):
        yield "other sign", sign.end(), "(1 - 2 * simt_at(NUMBER)) * ", None, ""


def sites_of(source: str, files: Collection[str]) -> list[Site]:
    """All mutants of these files under kernels/, in the order of their ranks.

    A rank depends on the text of a line alone, so that most of a draw outlives a change of the file.
    """
    text = HIDDEN.sub(blank, source)
    begins, places = [], []  # of lines: in the text, and file and number
    file, number, begin = "", 0, 0
    for line in source.split("\n"):
        marker = re.match(r'#line (\d+) "(?:kernels/)?([\w.]+)"', line)
        file, number = (marker[2], int(marker[1]) - 1) if marker else (file, number + 1)
        begins.append(begin)
        places.append((file, number, line))
        begin += len(line) + 1
    sites, often = [], dict[str, int]()
    for start, end in device_bodies(text):
        if places[bisect.bisect(begins, start) - 1][0] not in files:
            continue
        for kind, begin, before, last, behind in changes(text[start:end]):
            index = bisect.bisect(begins, start + begin) - 1
            file, number, line = places[index]
            key = f"{file} {kind} {start + begin - begins[index]} {line}"
            often[key] = often.get(key, 0) + 1
            rank = hashlib.blake2b(f"{key} {often[key]}".encode(), digest_size=8).hexdigest()
            sites.append(
                Site(kind, file, number, line.strip(), rank, start + begin, before, last and start + last, behind)
            )
    return sorted(sites, key=lambda site: site.rank)


# Where a mutant's place is reached is what the library says; warnings are about what stands in for numbers.
MOST_NUMBERS = 1024
SWITCH = f"""
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wparentheses"
#pragma GCC diagnostic ignored "-Wnarrowing"
#pragma GCC diagnostic ignored "-Wint-in-bool-context"
#pragma GCC diagnostic ignored "-Wbool-operation"
#pragma GCC diagnostic error "-Wvla"
extern "C" {{
unsigned char simt_reached[{MOST_NUMBERS}];  // by the numbers of mutants
}}
inline int simt_at(int number) {{
  simt_reached[number] = 1;
  return simt_mutation == number;
}}
"""


def with_switches(source: str, sites: Mapping[int, Site]) -> str:
    """The text with these mutants in it, by their numbers."""
    edits: list[tuple] = []  # place, what orders several there, text
    for number, site in sites.items():
        last = len(source) if site.end is None else site.end
        edits.append((site.begin, 1, -last, number, site.before.replace("NUMBER", str(number))))
        edits.append((last, 0, -site.begin, -number, site.behind.replace("NUMBER", str(number))))
    parts, done = [], 0
    for place, *_, text in sorted(edits):
        parts += [source[done:place], text]
        done = place
    return SWITCH + "".join(parts) + source[done:]
