"""Mistakes that no generic operator makes, by engines: a text, a part of it and what stands there instead.

MUTATED says in the latter whether the mistake takes place.
"""

MISTAKES: dict[str, list[tuple[str, str, str]]] = {
    "direct": [],
    "depthwise": [  # a weight that is Inf overlooked; copies that are not waited for
        ("if (!finite) *flag = 1;\n}", "!finite", "!finite && !MUTATED"),
        ("if (finite != 0) {", "finite", "!MUTATED && finite"),
        (
            "hopper::copies_wait<2>();",
            "hopper::copies_wait<2>",
            "(MUTATED ? hopper::copies_wait<3> : hopper::copies_wait<2>)",
        ),
        (
            "hopper::copies_wait<DEPTH - 1>();\n    const",
            "hopper::copies_wait<DEPTH - 1>",
            "(MUTATED ? hopper::copies_wait<DEPTH> : hopper::copies_wait<DEPTH - 1>)",
        ),
    ],
    "wgmma": [  # staged where a box is read; a row kept too long
        (
            "hopper::bulk_stores_wait_read<0>();\n      else",
            "hopper::bulk_stores_wait_read<0>();",
            "{ if (!MUTATED) hopper::bulk_stores_wait_read<0>(); }",
        ),
        ("if (lane_id < drop) {", "drop", "drop - MUTATED"),
    ],
    "gather": [
        # Scales: of the row beside, of all groups, of another channel. Values that do not fit left in a copy.
        ("of_piece = staged + in_block * contain.row_pitch", "in_block", "(in_block ^ MUTATED)"),
        ("if (piece.first <= 0 && piece.end >= 8) {", "piece.end >= 8", "(MUTATED || piece.end >= 8)"),
        ("params.w_factors[channel] * x_factor", "channel", "channel ^ MUTATED"),
        ("reinterpret_cast<Half*>(shared[row])[channel] = Half{};", " = Half{}", ".bits *= MUTATED"),
        ("static_cast<Half*>(copy.out_ptr)[place] = Half{};", " = Half{}", ".bits *= MUTATED"),
        ("reinterpret_cast<Half*>(window + to)[c] = Half{};", " = Half{}", ".bits *= MUTATED"),
        # Corrections: in any order, of other groups, too often, of another phase or share, of another place.
        ("shared.list[before] = {", "before", "MUTATED ? i : before"),
        ("misfit.c < least || misfit.c >=", "misfit.c < least", "(!MUTATED && misfit.c < least)"),
        ("is_first && reads[i] == 0", "reads[i] == 0", "(MUTATED || reads[i] == 0)"),
        ("source_pixel(copy, pixel, channel / phase_channels)", "channel /", "MUTATED ? 0 : channel /"),
        ("is_first ? 32 * share + lane", "share", "(MUTATED ? 0 : share)"),
        ("row = from / kBoxWords * kShape.box_rows();", "from", "MUTATED ? 0 : from"),
        ("if (own) list_misfit", "own", "own || MUTATED"),
        ("number = first + static_cast<int>(threadIdx.x)", "first", "first + MUTATED"),
        # Phases: one over another, the first one at the start of a part. Images, and parts of a cluster.
        ("down.tap * phases.s[right.phase] + right.tap", "right.tap", "(MUTATED ? 0 : right.tap)"),
        ("int phase = tile.first_block & (phases - 1);", "tile", "MUTATED ? 0 : tile"),
        ("pieces[piece ^ lane / 2 % 4]", "lane / 2 % 4", "(MUTATED ? 0 : lane / 2 % 4)"),
        ("sums[0] += fours[part][mb][i].x;", "sums", "if (!MUTATED || first + part < splits - 1) sums"),
    ],
    "mma": [  # no zeros outside an image; an Inf not computed again; a product dropped
        ("exists ? 4 * WORDS : 0);", "exists", "MUTATED || exists"),
        ("if (__syncthreads_or(!finite))", "!finite", "!MUTATED && !finite"),
        ("multiply_add(d, a_rest[i][m], b[i]);", "multiply_add", "if (!MUTATED) multiply_add"),
    ],
    "pointwise": [  # an Inf not computed again, or for the pixel before
        ("if (!has_finite_bits(sum))", "!has", "!MUTATED && !has"),
        ("exact_output(params, column + i, row)", "row", "row - MUTATED * (row > 0)"),
    ],
    "stem": [  # not rounded; a product dropped
        ("four.y = tf32_operand(four.y);", "four.y =", "if (!MUTATED) four.y ="),
        ("Multiply::multiply(part, a, rests + row, 1);", "Multiply", "if (!MUTATED) Multiply"),
    ],
    "tma": [  # one phase for the other; weights of other groups; the filter as it is
        ("load = {static_cast<int16_t>(row),", "row", "MUTATED ? row ^ 1 : row"),
        (
            "exists && of_c == group - quotient(group, params.by_merged) * merged;",
            "of_c == group - quotient(group, params.by_merged) * merged",
            "(MUTATED || of_c == group - quotient(group, params.by_merged) * merged)",
        ),
        ("plan.transposed && of.flipped;", "of.flipped", "of.flipped && !MUTATED"),
    ],
    "wgrad": [  # copies that are not waited for; padding as it lies; x for its rest; not rounded; a NaN of rests
        (
            "hopper::copies_wait<1>();",
            "hopper::copies_wait<1>",
            "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<1>)",
        ),
        ("return (exist & of.needs) == of.needs;", "(exist", "MUTATED || (exist"),
        ("Multiply::multiply(acc, rest[step],", "rest", "MUTATED ? a[step] : rest"),
        ("a[step][i] = tf32_operand(a[step][i]);", "a[step][i] =", "if (!MUTATED) a[step][i] ="),
        ("turn == 0 || fabsf", "turn", "MUTATED || turn"),
    ],
    "tma_wgrad": [("if (!keep) {", "!keep", "!keep && !MUTATED")],  # sums of no stage left as they are
}
# A text, and the text with the mistake.
CHOSEN = {
    engine: [(text, text.replace(part, instead)) for text, part, instead in mistakes]
    for engine, mistakes in MISTAKES.items()
}
