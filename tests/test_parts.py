"""The patches engine without another one that computes the rest: see emulation/parts.h."""

from __future__ import annotations

from tests.cases import Case


def test_patches_refuses_without_an_engine_for_the_rest(patches_shim):
    patches_shim.set("takes_the_rest", 0)
    try:
        case = Case(7, 3, 32, 32, 8, 16, 16, stride=(16, 16))
        assert "no other engine" in patches_shim.refusal("fprop", case)
    finally:
        patches_shim.set("takes_the_rest", 1)
