"""Mistakes that no generic operator makes, by engines: a text, and another one in which MUTATED says which holds."""

CHOSEN: dict[str, list[tuple[str, str]]] = {
    "direct": [],
    "depthwise": [  # a weight that is Inf overlooked; copies that nobody waited for
        ("if (!finite) *flag = 1;\n}", "if (!finite && !MUTATED) *flag = 1;\n}"),
        ("if (finite != 0) {", "if (!MUTATED && finite != 0) {"),
        ("hopper::copies_wait<2>();", "(MUTATED ? hopper::copies_wait<3> : hopper::copies_wait<2>)();"),
        (
            "hopper::copies_wait<DEPTH - 1>();\n    const",
            "(MUTATED ? hopper::copies_wait<DEPTH> : hopper::copies_wait<DEPTH - 1>)();\n    const",
        ),
    ],
    "wgmma": [  # staged where a box is read; a row kept too long
        (
            "hopper::bulk_stores_wait_read<0>();\n      else",
            "{ if (!MUTATED) hopper::bulk_stores_wait_read<0>(); }\n      else",
        ),
        ("if (lane_id < drop) {", "if (lane_id < drop - MUTATED) {"),
    ],
    "gather": [
        # Scales: of the row beside, of all groups, of another channel. Values that do not fit left in a copy.
        (
            "of_piece = staged + in_block * contain.row_pitch",
            "of_piece = staged + (in_block ^ MUTATED) * contain.row_pitch",
        ),
        ("if (piece.first <= 0 && piece.end >= 8) {", "if (piece.first <= 0 && (MUTATED || piece.end >= 8)) {"),
        ("params.w_factors[channel] * x_factor", "params.w_factors[channel ^ MUTATED] * x_factor"),
        (
            "reinterpret_cast<Half*>(shared[row])[channel] = Half{};",
            "reinterpret_cast<Half*>(shared[row])[channel].bits *= MUTATED;",
        ),
        (
            "static_cast<Half*>(copy.out_ptr)[place] = Half{};",
            "static_cast<Half*>(copy.out_ptr)[place].bits *= MUTATED;",
        ),
        (
            "reinterpret_cast<Half*>(window + to)[c] = Half{};",
            "reinterpret_cast<Half*>(window + to)[c].bits *= MUTATED;",
        ),
        # Corrections: in any order, of other groups, too often, of another phase or share, of another place.
        ("shared.list[before] = {", "shared.list[MUTATED ? i : before] = {"),
        ("misfit.c < least || misfit.c >=", "(!MUTATED && misfit.c < least) || misfit.c >="),
        ("is_first && reads[i] == 0", "is_first && (MUTATED || reads[i] == 0)"),
        (
            "source_pixel(copy, pixel, channel / phase_channels)",
            "source_pixel(copy, pixel, MUTATED ? 0 : channel / phase_channels)",
        ),
        ("is_first ? 32 * share + lane", "is_first ? 32 * (MUTATED ? 0 : share) + lane"),
        ("row = from / kBoxWords * kShape.box_rows();", "row = MUTATED ? 0 : from / kBoxWords * kShape.box_rows();"),
        ("if (own) list_misfit", "if (own || MUTATED) list_misfit"),
        ("number = first + static_cast<int>(threadIdx.x)", "number = first + MUTATED + static_cast<int>(threadIdx.x)"),
        # Phases: one over another, the first one at the start of a part. Images, and parts of a cluster.
        (
            "down.tap * phases.s[right.phase] + right.tap",
            "down.tap * phases.s[right.phase] + (MUTATED ? 0 : right.tap)",
        ),
        ("int phase = tile.first_block & (phases - 1);", "int phase = MUTATED ? 0 : tile.first_block & (phases - 1);"),
        ("pieces[piece ^ lane / 2 % 4]", "pieces[piece ^ (MUTATED ? 0 : lane / 2 % 4)]"),
        (
            "sums[0] += fours[part][mb][i].x;",
            "if (!MUTATED || first + part < splits - 1) sums[0] += fours[part][mb][i].x;",
        ),
    ],
    "mma": [  # no zeros outside an image; an Inf not computed again; a product dropped
        ("exists ? 4 * WORDS : 0);", "MUTATED || exists ? 4 * WORDS : 0);"),
        ("if (__syncthreads_or(!finite))", "if (__syncthreads_or(!MUTATED && !finite))"),
        ("multiply_add(d, a_rest[i][m], b[i]);", "if (!MUTATED) multiply_add(d, a_rest[i][m], b[i]);"),
    ],
    "pointwise": [  # an Inf not computed again, or for the pixel before
        ("if (!has_finite_bits(sum))", "if (!MUTATED && !has_finite_bits(sum))"),
        ("exact_output(params, column + i, row)", "exact_output(params, column + i, row - MUTATED * (row > 0))"),
    ],
    "stem": [  # not rounded; a product dropped
        ("four.y = tf32_operand(four.y);", "if (!MUTATED) four.y = tf32_operand(four.y);"),
        ("Multiply::multiply(part, a, rests + row, 1);", "if (!MUTATED) Multiply::multiply(part, a, rests + row, 1);"),
    ],
    "tma": [  # one phase for the other; weights of other groups; the filter as it is
        ("load = {static_cast<int16_t>(row),", "load = {static_cast<int16_t>(MUTATED ? row ^ 1 : row),"),
        (
            "exists && of_c == group - quotient(group, params.by_merged) * merged;",
            "exists && (MUTATED || of_c == group - quotient(group, params.by_merged) * merged);",
        ),
        ("plan.transposed && of.flipped;", "plan.transposed && of.flipped && !MUTATED;"),
    ],
    "wgrad": [  # copies that nobody waited for; padding as it lies; x for its rest; not rounded; a NaN of rests
        ("hopper::copies_wait<1>();", "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<1>)();"),
        ("return (exist & of.needs) == of.needs;", "return MUTATED || (exist & of.needs) == of.needs;"),
        ("Multiply::multiply(acc, rest[step],", "Multiply::multiply(acc, MUTATED ? a[step] : rest[step],"),
        ("a[step][i] = tf32_operand(a[step][i]);", "if (!MUTATED) a[step][i] = tf32_operand(a[step][i]);"),
        ("turn == 0 || fabsf", "MUTATED || turn == 0 || fabsf"),
    ],
    "tma_wgrad": [("if (!keep) {", "if (!keep && !MUTATED) {")],  # sums of no stage left as they are
}
