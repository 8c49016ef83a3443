"""Mistakes compiled into the emulated kernels, one of which takes place at a time: see with_mutations."""

from __future__ import annotations

from tests.emulation import left_out

DEPTHWISE_MUTATIONS = {
    "weights taken for finite": left_out("if (!finite) *flag = 1;\n}"),
    "rows above the image multiplied": ("(row + STRIDE <= 0); ++step", "(row + STRIDE <= (MUTATED ? -2 : 0)); ++step"),
    "an output too many": ("if (j < outputs_q) narrow(", "if (MUTATED || j < outputs_q) narrow("),
    "a column behind the image": ("inside &= first_column + j < W;", "inside &= first_column + j < W + MUTATED;"),
    "a chunk not waited for": (
        "hopper::copies_wait<2>();",
        "(MUTATED ? hopper::copies_wait<3> : hopper::copies_wait<2>)();",
    ),
    "halo not cleared": left_out("reinterpret_cast<Pack<float, 4>*>(x_smem)[i] = Pack<float, 4>{};"),
    "queue: weights taken for finite": ("if (finite != 0) {", "if (!MUTATED && finite != 0) {"),
    "queue: a step not waited for": (
        "hopper::copies_wait<DEPTH - 1>();\n    const",
        "(MUTATED ? hopper::copies_wait<DEPTH> : hopper::copies_wait<DEPTH - 1>)();\n    const",
    ),
    "queue: a column behind the image": (
        "columns_inside |= is_within(first_column + j, params.columns.inputs)",
        "columns_inside |= is_within(first_column + j, params.columns.inputs + MUTATED)",
    ),
    "queue: a step too many": ("int to_order = outputs_p - step;", "int to_order = outputs_p - step + MUTATED;"),
}

DILATED_MUTATIONS = {
    "a padding too much": ("(other - shifted) / d};", "(other - shifted) / d + MUTATED};"),
    "another phase of x": ("run.first_x * p.x_stride[2];", "(run.first_x + MUTATED) * p.x_stride[2];"),
    "images of another distance": ("of.y_stride[0] = p.y_stride[2];", "if (!MUTATED) of.y_stride[0] = p.y_stride[2];"),
    "rows that follow one another": left_out("of.x_stride[2] *= p.dilation_h;"),
    "phases of unlike images in one batch": (
        "run.rows_x == last.rows_x",
        "(MUTATED || run.rows_x == last.rows_x)",
    ),
    "phases of unlike padding in one batch": ("run.pad == last.pad", "(MUTATED || run.pad == last.pad)"),
    "the first tap of all": ("rows.first * p.w_stride[2] +", "rows.first * p.w_stride[2] * !MUTATED +"),
    "a tap too few": ("(int64_t{size} - 1 + pad) / dilation);", "(int64_t{size} - 1 + pad - MUTATED) / dilation);"),
    "only the first part": ("if (!use(part)) return false;", "if (!use(part) || MUTATED) return false;"),
}

PATCHES_MUTATIONS = {
    "patches of the next row": (
        "params.row = stride[2] * problem.R;",
        "params.row = stride[2] * (problem.R + MUTATED);",
    ),
    "patches of every column": (
        "params.column = stride[3] * problem.S;",
        "params.column = stride[3] * (MUTATED ? 1 : problem.S);",
    ),
    "another order than that of the weights": ("!= Lie::kPixels) return", "!= Lie::kPixels || MUTATED) return"),
    "rows of pixels that are not side by side": (
        "if (stride[3] == C * stride[1]) return",
        "if (stride[3] == C * stride[1] || MUTATED) return",
    ),
    "values behind a patch": ("first + i < params.values ?", "first + i < params.values || MUTATED ?"),
    "weights that are not filled up": (
        "|| row_of(problem) != values_of(problem);",
        "|| (!MUTATED && row_of(problem) != values_of(problem));",
    ),
}

STRIDED_MUTATIONS = {
    "a padding too much": ("* dilation) / stride);\n", "* dilation) / stride) + MUTATED;\n"),
    "the first tap of all": ("row.first * p.w_stride[2] +", "row.first * p.w_stride[2] * !MUTATED +"),
    "taps side by side": left_out("of.w_stride[3] *= column.step;"),
    "rows side by side": left_out("of.x_stride[2] *= stride_h;"),
    "columns of the first phase": ("b * p.x_stride[3],", "b * !MUTATED * p.x_stride[3],"),
    "taps as far apart as before": ("dilation / common;\n", "dilation / (MUTATED ? 1 : common);\n"),
    "a row too few": ("ceil_div(size - number, stride));", "ceil_div(size - number - MUTATED, stride));"),
    "no zeros": ("if (idle_phases(problem) > 0) {", "if (!MUTATED && idle_phases(problem) > 0) {"),
    "only the first part": ("if (!use(part)) return false;", "if (!use(part)) return false; if (MUTATED) return true;"),
}

# Each takes away what some other warp relies on.
WGMMA_MUTATIONS = {
    "reads rows before they are there": left_out("hopper::barrier_wait(shared.x_full("),
    "overwrites rows in use": left_out("hopper::barrier_wait(shared.x_empty("),
    "reads weights before they are there": left_out("hopper::barrier_wait(shared.w_full(w"),
    "overwrites weights in use": left_out("hopper::barrier_wait_idly(shared.w_empty(at"),
    "stages where another warp does": left_out("hopper::barrier_wait(shared.staging_turn("),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();"),
    "stages where a box is read": (
        "hopper::bulk_stores_wait_read<0>();\n      else",
        "(MUTATED ? hopper::bulk_stores_commit : hopper::bulk_stores_wait_read<0>)();\n      else",
    ),
    "stages where the last boxes are read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<0>();"),
    "leaves before its boxes are read": left_out("hopper::bulk_stores_wait_read<0>();  // shared memory"),
    "stores before all is staged": left_out("__syncwarp();  // all pixels are staged"),
    "keeps a row": ("if (lane_id < drop) {", "if (lane_id < drop - MUTATED) {"),
    "adds up a group before it is done": left_out("hopper::wgmma_wait<1>();\n            if (w_latest"),
}

# Each puts something out of place, by one as a rule.
GATHER_PLAN_MUTATIONS = {
    "an image too few of a tile": ("(of.P * of.Q) + 2 : 0;", "(of.P * of.Q) + 2 - MUTATED : 0;"),
    "images with gaps between channels": ("of.in_stride[1] == plane", "(MUTATED || of.in_stride[1] == plane)"),
    "images at odd addresses": ("out_bytes == 4 && aligned_in &&", "out_bytes == 4 && (MUTATED || aligned_in) &&"),
    "images of some of a stage's channels": (
        "of.in_channels % (plan.pieces * channels) == 0))\n    return false;",
        "(MUTATED || of.in_channels % (plan.pieces * channels) == 0)))\n    return false;",
    ),
    "a row too few between images": (
        "plan.gap = static_cast<int>(gap);",
        "plan.gap = static_cast<int>(gap) - MUTATED;",
    ),
    "rows too short": (
        "plan.pitch = static_cast<int>(pitch);",
        "plan.pitch = static_cast<int>(pitch) - MUTATED;",
    ),
    "quarters that overlap": (
        "m % 4 * (tile_pixels(plan) / 4 + 2)",
        "m % 4 * (tile_pixels(plan) / 4 + (MUTATED ? -1 : 2))",
    ),
    "y as if it were aligned": (
        "plan.vector = aligned_out && fours",
        "plan.vector = (MUTATED || aligned_out) && fours",
    ),
    "x as if it were aligned": (
        "dense_points && address.in % (4 * in_bytes) == 0",
        "dense_points && (MUTATED || address.in % (4 * in_bytes) == 0)",
    ),
    "a workspace without room for weights": (
        "layout.packed + aligned(packed_bytes(plan.contained ? merged(of) : of, plan));",
        "layout.packed + (MUTATED ? 0 : aligned(packed_bytes(plan.contained ? merged(of) : of, plan)));",
    ),
    "packed tiles that start a line too early": (
        "const int most_skipped = plan.packed ? of.Q",
        "const int most_skipped = plan.packed ? of.Q / (MUTATED ? 2 : 1)",
    ),
    "parts of channels that overlap": (
        "tile.first_block = part_of_tile(plan, tile.part) * plan.split_blocks;",
        "tile.first_block = part_of_tile(plan, tile.part) * (plan.split_blocks - MUTATED);",
    ),
    "a list that is too short": (
        "aligned(kMostListed * static_cast",
        "aligned(kMostListed / (MUTATED ? 2 : 1) * static_cast",
    ),
    "a copy whose channels are not filled up": left_out("result.in_channels = (source.in_channels + 7) / 8 * 8;"),
    "a workspace without room for the copy": (
        "layout.copied + aligned(bytes_of_copy);",
        "layout.copied + aligned(bytes_of_copy / (MUTATED ? 2 : 1));",
    ),
    "a workspace with room for a copy that is not made": (
        ": plan.copied    ? copied_bytes(of, element_bytes)",
        ": plan.copied || MUTATED ? copied_bytes(of, element_bytes)",
    ),
    "groups as one whose channels fill more than a stage": (
        "kContainedBlock / of.in_channels;",
        "kContainedBlock / of.in_channels * (MUTATED ? 2 : 1);",
    ),
    "points that skip what their copy has not": left_out("result.stride_h = result.stride_w = 1;"),
    "lines of the copy too short": ("result.W * channels;", "(result.W - MUTATED) * channels;"),
    "clusters whose blocks have more than one part": (
        "parts <= plan.blocks && (splits == 2",
        "(MUTATED || parts <= plan.blocks) && (splits == 2",
    ),
    "more clusters than run at once": (
        "plan.blocks <= kClusterShare * at_once",
        "plan.blocks <= (MUTATED ? 1 : kClusterShare) * at_once",
    ),
    "parts of what is done again": ("address, kAgainShape, 1, 0", "address, kAgainShape, MUTATED ? 0 : 1, 0"),
    "phases whose first tap is the next one": (
        "first[phase] = (r - pad - phase) / 2 + start;",
        "first[phase] = (r - pad - phase) / 2 + start + MUTATED;",
    ),
    "windows of phases that start too late": (
        "const int start = (pad + 1) / 2,",
        "const int start = (pad + !MUTATED) / 2,",
    ),
    "a copy in phases without its last row": (
        "result.H = of.P + result.R - 1;",
        "result.H = of.P + result.R - 1 - MUTATED;",
    ),
    "phases that share stages": (
        "* phases.s[(phase - 1) % 2];",
        "* phases.s[(phase - !MUTATED) % 2];",
    ),
    "phases of channels that are no blocks": (
        "const int blocks = (of.in_channels + block_channels - 1) / block_channels;",
        "const int blocks = MUTATED ? std::max(1, of.in_channels / block_channels)"
        " : (of.in_channels + block_channels - 1) / block_channels;",
    ),
    "boxes of more slots than there may be": (
        "ceil_div(plan.slots, 256)",
        "ceil_div(plan.slots, MUTATED ? 512 : 256)",
    ),
    "boxes of planes so small that they are of three images": (
        "of.P * of.Q >= kLeastBoxedPlane",
        "of.P * of.Q >= (MUTATED ? 8 : kLeastBoxedPlane)",
    ),
    "boxes that start in the middle of eight slots": (
        "ceil_div(ceil_div(plan.slots, plan.x_boxes), 8)) * 8",
        "ceil_div(ceil_div(plan.slots, plan.x_boxes), MUTATED ? 1 : 8)) * (MUTATED ? 1 : 8)",
    ),
    "phases of x that start a pair too late": (
        "result.pad_h = (of.pad_h + 1) / 2;",
        "result.pad_h = (of.pad_h + !MUTATED) / 2;",
    ),
    "phases of x without its last column": ("result.W = (of.W + 1) / 2;", "result.W = (of.W + !MUTATED) / 2;"),
    "boxes of more columns than there may be": (
        "plan.pitch * plan.box_step <= 256",
        "plan.pitch * (MUTATED ? 1 : plan.box_step) <= 256",
    ),
    "boxes of neighbouring columns at a stride": (
        "from_phases ? 2 : plan.in_column_step;",
        "from_phases ? 2 : MUTATED ? 1 : plan.in_column_step;",
    ),
    "windows that start between fours": (
        "shape.channels_last || shape.whole_rows() ? 0 : -of.pad_w & 3;",
        "shape.channels_last || shape.whole_rows() || MUTATED ? 0 : -of.pad_w & 3;",
    ),
    "tiles of more rows than what lands has": (
        "(shape.window_rows() - of.R) / shape.stride",
        "(shape.window_rows() - (MUTATED ? 1 : of.R)) / shape.stride",
    ),
    "windows without what a wgmma reads behind their end": (
        "std::max(landing.window_rows * shape.pitch(), last)",
        "std::max(landing.window_rows * shape.pitch(), MUTATED ? 0 : last)",
    ),
    "boxes of whole rows that are apart": (
        "(of.in_stride[2] == of.W || of.H == 1)",
        "(MUTATED || of.in_stride[2] == of.W || of.H == 1)",
    ),
    "boxes of whole rows that have more columns": (
        "of.W == shape.box_columns() && of.pad_w == kWholeRowsPadding &&",
        "(MUTATED || (of.W == shape.box_columns() && of.pad_w == kWholeRowsPadding)) &&",
    ),
    "boxes of y that end in another tile": (
        "!landing.shape.channels_last && of.Q > shape.columns",
        "!landing.shape.channels_last && of.Q > shape.columns && !MUTATED",
    ),
    "boxes of y from anywhere": (
        "of.P, of.Q) || address.out % 16 != 0))",
        "of.P, of.Q) || (!MUTATED && address.out % 16 != 0)))",
    ),
    "values that two tiles list": (
        "row < landing.shape.stride * landing.span ||",
        "row < landing.shape.stride * landing.span + MUTATED ||",
    ),
    "values that no tile lists at a stride": (
        "(row < landing.shape.stride * landing.span",
        "(row < (MUTATED ? 1 : landing.shape.stride) * landing.span",
    ),
    "values that the last tile of a row does not list": (
        "column < landing.shape.stride * plan.tile_q || tile.q",
        "column < landing.shape.stride * plan.tile_q || MUTATED ? true && column < landing.shape.stride * plan.tile_q"
        " : tile.q",
    ),
    "taps apart of other strides": (
        "return of.stride_h == 1 && of.stride_w == 1 &&",
        "return (MUTATED || (of.stride_h == 1 && of.stride_w == 1)) &&",
    ),
    "slots as in memory of whole lines": (
        "phases_of(of.phases) > 1 && plan.packed)",
        "phases_of(of.phases) > 1 && (MUTATED || plan.packed))",
    ),
}

# Each takes away what some other warp relies on, or moves what another one reads.
GATHER_MUTATIONS = {
    "reads x before it is there": left_out("hopper::barrier_wait(shared.x_full("),
    "overwrites weights in use": left_out("hopper::barrier_wait_idly(shared.w_empty(at"),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();"),
    "reads points elsewhere": (
        "m % 4 * (tile_pixels(plan) / 4 + 2)",
        "m % 4 * (tile_pixels(plan) / 4 + 2 - MUTATED)",
    ),
    "stages where a box is read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the buffer",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the buffer",
    ),
    "stages where a box of planes is read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the planes",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<BUFFERS - 1>();\n      __syncwarp();  // the planes",
    ),
    "stores a box of planes before all is staged": left_out("__syncwarp();  // all planes are staged"),
    "stores the next image's first pixels as another channel's box": (
        "pieces[piece ^ lane / 2 % 4]",
        "pieces[piece ^ (MUTATED ? 0 : lane / 2 % 4)]",
    ),
    "puts a cluster's sums where the other warpgroup still reads": left_out(
        "named_barrier(kMultiplyBarrier, 128 * WARPGROUPS);  // nobody reads the rings any more"
    ),
    "adds up a cluster's sums before they are there": left_out("hopper::cluster_sync();  // the sums of all blocks"),
    "adds up all of a cluster but the last one": (
        "sums[0] += fours[part][mb][i].x;",
        "if (!MUTATED || first + part < splits - 1) sums[0] += fours[part][mb][i].x;",
    ),
    "packs channels of images as neighbours": (
        "first = in_row + before * (Format::CHANNELS - 1);",
        "first = in_row + before * (Format::CHANNELS - 1) + MUTATED * (in_row - before) % 8;",
    ),
    "reads the next of several images where this one would go on": (
        "return n * plan.image_words + in_images - n * plan.plane_slots;",
        "return MUTATED ? in_images : n * plan.image_words + in_images - n * plan.plane_slots;",
    ),
    "expects less of images than comes": ("images * image_bytes);", "(images - MUTATED) * image_bytes);"),
    "stores another block's share of a cluster": (
        "const Share own{rank * kChunks / splits,",
        "const Share own{(rank + MUTATED) * kChunks / splits,",
    ),
    "contains rows of weights before they are measured": left_out("__syncthreads();  // all have seen their weights"),
    "contains rows of weights from the row beside": (
        "of_piece = staged + in_block * contain.row_pitch",
        "of_piece = staged + (in_block ^ MUTATED) * contain.row_pitch",
    ),
    "contains a whole piece of weights where a group ends": (
        "if (piece.first <= 0 && piece.end >= 8) {",
        "if (piece.first <= 0 && (MUTATED || piece.end >= 8)) {",
    ),
    "stores what was staged of every other channel": (
        "staged + i * DISTANCE * kPixelsPitch;",
        "staged + i * (DISTANCE >> MUTATED) * kPixelsPitch;",
    ),
    "leaves out the last channel of what was staged": (
        "if (exists && k + i * DISTANCE < channels) {",
        "if (exists && k + i * DISTANCE < channels - MUTATED) {",
    ),
    "adds the bias of another channel": ("widen(bias[k + i * DISTANCE])", "widen(bias[k + i * (DISTANCE >> MUTATED)])"),
    "stages the bias of another channel": ("staged_bias[k] = added(k);", "staged_bias[k] = added(k ^ MUTATED);"),
    "contains weights of the next group as this one's": (
        "piece.first <= c && c < piece.end ? of_piece",
        "(MUTATED || piece.first <= c) && c < piece.end ? of_piece",
    ),
    "mends outputs of other groups": (
        "misfit.c < least || misfit.c >=",
        "(!MUTATED && misfit.c < least) || misfit.c >=",
    ),
    "contains x before all of it is there": (
        "if constexpr (VECTOR != 8) {\n    __syncthreads();",
        "if constexpr (VECTOR != 8) {\n    if (!MUTATED) __syncthreads();",
    ),
    "leaves what does not fit in the copy, by pixels": (
        "reinterpret_cast<Half*>(shared[row])[channel] = Half{};",
        "reinterpret_cast<Half*>(shared[row])[channel].bits *= MUTATED;",
    ),
    "leaves what does not fit in the copy, by eights": (
        "static_cast<Half*>(copy.out_ptr)[place] = Half{};",
        "static_cast<Half*>(copy.out_ptr)[place].bits *= MUTATED;",
    ),
    "mends in the order in which values came": (
        "shared.list[before] = {",
        "shared.list[MUTATED ? i : before] = {",
    ),
    "mends before the list is there": left_out("__syncthreads();  // the list is in order"),
    "mends before one has looked at the list": left_out("__syncwarp();  // all of the list has been looked at"),
    "mends the next output too early": left_out("__syncwarp();  // the next output's do not overtake them"),
    "mends once for each value": ("is_first && reads[i] == 0", "is_first && (MUTATED || reads[i] == 0)"),
    "packs before what came before has ended": left_out("hopper::wait_for_prerequisites();  // whoever wrote w and x"),
    "contains before what came before has ended": left_out(
        "hopper::wait_for_prerequisites();  // whoever wrote x and w"
    ),
    "allows the next call before it has ended": (
        "if (Format::CONTAINED) hopper::launch_dependents",
        "if (MUTATED || Format::CONTAINED) hopper::launch_dependents",
    ),
    "mends another share of the channels than its own": (
        "is_first ? 32 * share + lane",
        "is_first ? 32 * (MUTATED ? 0 : share) + lane",
    ),
    "mends values of one phase as another's": (
        "source_pixel(copy, pixel, channel / phase_channels)",
        "source_pixel(copy, pixel, MUTATED ? 0 : channel / phase_channels)",
    ),
    "reads phases from the next slot on": (
        "shift = phases.first_r[row_phase] * plan.pitch + phases.first_s[column_phase];",
        "shift = phases.first_r[row_phase] * plan.pitch + phases.first_s[column_phase] + MUTATED;",
    ),
    "packs taps of phases one over another": (
        "down.tap * phases.s[right.phase] + right.tap",
        "down.tap * phases.s[right.phase] + (MUTATED ? 0 : right.tap)",
    ),
    "contains phases of columns one over another": (
        "return place + (phase + row % kRowsOfPixel) * phase_channels;",
        "return place + (phase + (MUTATED ? 0 : row % kRowsOfPixel)) * phase_channels;",
    ),
    "loads the first phase at the start of a part": (
        "int phase = tile.first_block & (phases - 1);",
        "int phase = MUTATED ? 0 : tile.first_block & (phases - 1);",
    ),
    "multiplies by the first phase at the start of a part": (
        "phase = phased ? tile.first_block & (phases_of(phases) - 1) : 0;",
        "phase = phased && !MUTATED ? tile.first_block & (phases_of(phases) - 1) : 0;",
    ),
    "loads even rows of x itself for odd ones": (
        "h = 2 * h + row_phase;",
        "h = 2 * h + (MUTATED ? 0 : row_phase);",
    ),
    "loads even columns of x itself for odd ones": (
        "w = 2 * w + column_phase;",
        "w = 2 * w + (MUTATED ? 0 : column_phase);",
    ),
    "stores boxes of lines that are not there into the next image": (
        "pixels.exist && first + 16",
        "(MUTATED || pixels.exist) && first + 16",
    ),
    "stores boxes of all lines as the first one's": ("first = p * of.Q + q;", "first = (MUTATED ? 0 : p) * of.Q + q;"),
    "reads what lands before it has": left_out("hopper::barrier_wait_idly(shared.landed_full("),
    "lands where something else is still read": left_out("hopper::barrier_wait_idly(shared.landed_empty("),
    "puts what landed into windows in use": left_out("hopper::barrier_wait_idly(shared.x_empty("),
    "gives back what landed before all have read it": left_out("__syncwarp();  // what has landed has been read"),
    "stages what landed where a box is read": left_out("hopper::barrier_wait(shared.staged_empty("),
    "stores what landed before all is staged": left_out("__syncwarp();  // all channels are staged"),
    "leaves in a window what landed and does not fit": (
        "reinterpret_cast<Half*>(window + to)[c] = Half{};",
        "reinterpret_cast<Half*>(window + to)[c].bits *= MUTATED;",
    ),
    "copies weights of what lands where others are read": left_out(
        "hopper::barrier_wait_idly(shared.w_empty(w.slot()),"
    ),
    "multiplies what landed by weights that are not there": (
        "if (kShares || r == 0) hopper::barrier_wait(shared.w_full(",
        "if ((kShares || r == 0) && !MUTATED) hopper::barrier_wait(shared.w_full(",
    ),
    "multiplies even columns of what landed by taps of odd ones": (
        "kShape.slot_of(r, s) + i * kSlots",
        "kShape.slot_of(r, kShape.stride == 2 && MUTATED ? s / 2 * 2 : s) + i * kSlots",
    ),
    "puts odd columns of what landed where even ones are": (
        "Shape::kShape.phase_slots() - 1);",
        "Shape::kShape.phase_slots() - !MUTATED);",
    ),
    "puts halves of the channels of what landed the other way round": (
        "(2 * piece + four) * 16",
        "(2 * (piece ^ MUTATED) + four) * 16",
    ),
    "leaves what lies beside landed rows as it was": (
        "i < shared.layout.w_ring;",
        "i < shared.layout.w_ring && !MUTATED;",
    ),
    "lists what landed of all boxes as of the first one": (
        "row = from / kBoxWords * kShape.box_rows();",
        "row = MUTATED ? 0 : from / kBoxWords * kShape.box_rows();",
    ),
    "lists what landed of the second of two pieces as of the first one": (
        "const int from = pixels[i].from + (kShape.channels_last ? 0 : j);",
        "const int from = pixels[i].from + (kShape.channels_last || MUTATED ? 0 : j);",
    ),
    "stores the rest of the rows that landed where the first ones are": (
        "tile.p + own_row + kFirstRow;",
        "tile.p + own_row + (MUTATED ? 0 : kFirstRow);",
    ),
    "stages the rest of what landed where the first rows are read": (
        "if (lane == 0) hopper::bulk_stores_wait_read<0>();\n      __syncwarp();  // the rows before",
        "if (lane == 0 && !MUTATED) hopper::bulk_stores_wait_read<0>();\n      __syncwarp();  // the rows before",
    ),
    "stages the rest of what landed before the first rows have been read": left_out(
        "__syncwarp();  // the rows before have been read"
    ),
    "does all again without the first piece of a part": (
        "number = first + static_cast<int>(threadIdx.x)",
        "number = first + MUTATED + static_cast<int>(threadIdx.x)",
    ),
    "lists what landed in each window": ("if (own) list_misfit", "if (own || MUTATED) list_misfit"),
    "brings weights of the first tile of channels": (
        "tile.n_block * plan.tile_n, 0, 0, shared",
        "(MUTATED ? 0 : tile.n_block) * plan.tile_n, 0, 0, shared",
    ),
    "copies x from elsewhere": ("from[channel * of.in_stride[1]]", "from[(channel + MUTATED) * of.in_stride[1]]"),
    "by tma: undoes the scale of another channel": (
        "params.w_factors[channel] * x_factor",
        "params.w_factors[channel ^ MUTATED] * x_factor",
    ),
    "by tma: packs pieces of a row in another order": (
        "piece_of_all = number - tap * params.pieces;",
        "piece_of_all = number - tap * params.pieces; if (MUTATED) piece_of_all = params.pieces - 1 - piece_of_all;",
    ),
    "by tma: stages floats where others are read": left_out(
        "__syncwarp();  // floats of the run before have been read"
    ),
    "by tma: stores floats before all are staged": left_out("__syncwarp();  // all floats of the run are staged"),
}

# Each puts something out of place.
MMA_PLAN_MUTATIONS = {
    "no columns for alignment": ("plan.lead = lead_of(1);", "plan.lead = MUTATED ? 0 : lead_of(1);"),
    "boxes of any size": (
        "x_boxes && rows <= 256 && plan.columns <= 256",
        "x_boxes && (MUTATED || (rows <= 256 && plan.columns <= 256))",
    ),
    "w as if it were aligned": (
        "address.w % 16 == 0 && fours(of.w_stride_out, of.out_channels)",
        "(MUTATED || address.w % 16 == 0) && fours(of.w_stride_out, MUTATED ? 1 : of.out_channels)",
    ),
    "taps in the order of memory": (
        "!plan.taps_first && !of.flipped && (of.S",
        "!plan.taps_first && (MUTATED || !of.flipped) && (of.S",
    ),
}

# Each takes away what others rely on, or leaves out a part of the sum.
MMA_MUTATIONS = {
    "no zeros outside an image": ("exists ? 4 * WORDS : 0);", "MUTATED || exists ? 4 * WORDS : 0);"),
    "another column in front": (
        "column * plan.pixel_words + plan.lead",
        "column * plan.pixel_words + (MUTATED ? 0 : plan.lead)",
    ),
    "reads a chunk before it is there": left_out("hopper::barrier_wait(barriers + 8 * slot"),
    "overwrites a chunk in use": left_out("__syncthreads();  // nobody reads chunk i - 1"),
    "Inf is not computed again": ("if (__syncthreads_or(!finite))", "if (__syncthreads_or(!MUTATED && !finite))"),
    "a product dropped": left_out("multiply_add(d, a_rest[i][m], b[i]);"),
}

# Each puts something out of place.
POINTWISE_PLAN_MUTATIONS = {
    "w as if it were aligned": ("address.w % 16 == 0;", "(MUTATED || address.w % 16 == 0);"),
    "planes of x astray": (
        "fours(of.in_stride[1], of.in_channels) &&",
        "(MUTATED || fours(of.in_stride[1], of.in_channels)) &&",
    ),
    "pixels of x astray": ("fours(of.in_stride[3], of.W)", "(MUTATED || fours(of.in_stride[3], of.W))"),
    "y as if it were aligned": ("aligned_out && out_fours ? 4", "(MUTATED || aligned_out) && out_fours ? 4"),
    "a step too few": ("ceil_div(steps, plan.slices", "ceil_div(steps - (MUTATED && steps > 1), plan.slices"),
    "a row too few": ("ceil_div(plan.rows, block", "ceil_div(plan.rows - MUTATED, block"),
    "every pixel of a row": ("(of.in_stride[3]) * of.stride_w", "(of.in_stride[3]) * (MUTATED ? 1 : of.stride_w)"),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
    "stages of several lines": ("if (of.P != 1) return", "if (!MUTATED && of.P != 1) return"),
    "stages where y is no fours": ("&& plan.out_vector == 4;", "&& (MUTATED || plan.out_vector == 4);"),
    "stages in full accuracy": ("if (exact || !fours)", "if ((!MUTATED && exact) || !fours)"),
}

# Each takes away what others rely on, looks where nothing is, or leaves out a part of the sum.
POINTWISE_MUTATIONS = {
    "adds up before all is there": left_out("__syncthreads();  // sums of all slices"),
    "rows that do not exist": ("+ n, plan.rows - 1);", "+ n, plan.rows - (MUTATED ? -31 : 1));"),
    "columns that do not exist": ("existing = min(column, last);", "existing = min(column, last + 31 * MUTATED);"),
    "filters that do not exist": ("existing * params.w_out", "(MUTATED ? column : existing) * params.w_out"),
    "single terms that do not exist": ("|| AHEAD + i < left;", "|| MUTATED || AHEAD + i < left;"),
    "begins behind the end": (
        "min((rank * plan.slices + slice) * plan.slice_steps, steps)",
        "min((rank * plan.slices + slice) * plan.slice_steps, MUTATED ? 1000000 : steps)",
    ),
    "the last slice left out": ("j < 4; ++j) add(parts[j]);", "j < 4 - MUTATED; ++j) add(parts[j]);"),
    "the last columns left out": ("stores = column < plan.columns;", "stores = column + 4 * MUTATED < plan.columns;"),
    "reads other blocks' sums early": left_out("hopper::cluster_sync();"),
    "another block's rows": ("row = own_row + rank * share;", "row = own_row + (rank + MUTATED) * share;"),
    "Inf is not computed again": ("if (!has_finite_bits(sum))", "if (!MUTATED && !has_finite_bits(sum))"),
    "computes another channel again": (
        "exact_output(params, row, column + i)",
        "exact_output(params, row - MUTATED * (row > 0), column + i)",
    ),
    "computes another pixel again": (
        "exact_output(params, column + i, row)",
        "exact_output(params, column + i, row - MUTATED * (row > 0))",
    ),
    "a product dropped": left_out("multiply_add(d, a[m], b_rest);"),
    "stages before they are there": (
        "hopper::copies_wait<kStages - 1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<kStages - 1>)();",
    ),
    "stages that other threads copy": left_out("__syncthreads();          // what all threads have copied"),
    "rows of stages from before w": ("a_row + i * A_APART,", "a_row + i * A_APART - 100 * MUTATED,"),
    "pixels of stages that do not exist": ("params.columns - 4)", "params.columns + 60 * MUTATED - 4)"),
    "the next image": ("return image * of_image", "return (image + MUTATED) * of_image"),
    "the next image of y": ("2), params.y_image)", "2), params.y_image + 4 * MUTATED)"),
    "planes of x as those of y": (
        "i * B_APART) * params.x_channel",
        "i * B_APART) * (MUTATED ? params.y_channel : params.x_channel)",
    ),
    "filters one behind the other": (
        "1) * params.w_out + a_term)",
        "1) * (MUTATED ? kStages * TERMS : params.w_out) + a_term)",
    ),
    "the last pair left out": ("column + 8 * j >= params.columns)", "column + 8 * j + 2 * MUTATED >= params.columns)"),
    "another row's bias": ("min(row + 8 * i, params.rows - 1)", "min(row + 8 * i + MUTATED, params.rows - 1)"),
}

WGRAD_MUTATIONS = {
    "a row too few": ("- 2) / window.width + 1;", "- 2) / window.width + !MUTATED;"),
    "a channel too few": ("(kTileE + taps - 2) / taps + 1);", "(kTileE + taps - 2) / taps + !MUTATED);"),
    "no lead": ("% window.values) % window.values);", "% window.values) % window.values * !MUTATED);"),
    "columns of one tap": ("* problem.stride_w + S_reach + 1;", "* problem.stride_w + S_reach * !MUTATED + 1;"),
    "boxes anywhere": ("whole(x_bytes + places_bytes);", "whole(x_bytes + places_bytes) + 16 * MUTATED;"),
    "a stage too few": ("plan.splits = ceil_div(stages,", "plan.splits = ceil_div(stages - MUTATED,"),
}

# Each takes away what others rely on, or takes something for something else.
WGRAD_SHIM_MUTATIONS = {
    "multiplies before a stage is there": left_out("hopper::barrier_wait(ring.full(), ring.parity);"),
    "overwrites a stage in use, by boxes": left_out("hopper::barrier_wait(ordered.empty(),"),
    "overwrites a stage in use": left_out("hopper::barrier_wait(ring.empty(), ring.parity ^ 1);"),
    "rounds dy before it is there": left_out("hopper::barrier_wait(ring.landed(), ring.parity);"),
    "gives a stage before its copies are there": (
        "hopper::copies_wait<1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<1>)();",
    ),
    "gives the only stage before its copies are there": (
        "hopper::copies_wait<0>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<0>)();",
    ),
    "gives one of three stages before its copies are there": (
        "hopper::copies_wait<kMostAhead - 1>();",
        "(MUTATED ? hopper::copies_wait<8> : hopper::copies_wait<kMostAhead - 1>)();",
    ),
    "gives a stage without its copies": left_out("hopper::copies_arrive(ring.full());"),
    "gives a stage before all lanes have stored": (
        "hopper::fence_async();\n    __syncwarp();",
        "hopper::fence_async();\n    if (!MUTATED) __syncwarp();",
    ),
    "gives back before it is multiplied": left_out("hopper::wgmma_wait<0>();\n      hopper::wgmma_settle(sums"),
    "adds up a stage before it is done": left_out("hopper::wgmma_wait<0>();\n        hopper::wgmma_settle(acc"),
    "multiplies before the table is there": left_out("__syncthreads();\n\n  if (warp < kMultiplyingWarps)"),
    "rows of padding as they lie": (
        "first_row + copy[i][1] < static_cast<unsigned>(params.H)",
        "(MUTATED || first_row + copy[i][1] < static_cast<unsigned>(params.H))",
    ),
    "columns of padding as they lie": (
        "first_column + copy[i][2] < static_cast<unsigned>(params.W)",
        "(MUTATED || first_column + copy[i][2] < static_cast<unsigned>(params.W))",
    ),
    "padding as it lies": (
        "return (exist & of.needs) == of.needs;",
        "return MUTATED || (exist & of.needs) == of.needs;",
    ),
    "pixels of no output": (
        "? static_cast<uint32_t>(place * BYTES) : kNowhere",
        "|| MUTATED ? place * BYTES : kNowhere",
    ),
    "a channel that is not there": ("exist ? static_cast<uint32_t>(row) : kNoRow", "exist || MUTATED ? row : kNoRow"),
    "the next row of dy": (
        "box[1] = params.image_is_row ? 0 : first_p;",
        "box[1] = params.image_is_row ? 0 : first_p + MUTATED;",
    ),
    "the next strip of dy": ("? first : strip_q;", "? first : strip_q * !MUTATED;"),
    "the first image's dy": (
        "      box[3] = n;\n    }\n    expected",
        "      box[3] = n * !MUTATED;\n    }\n    expected",
    ),
    "the first tile's dy": ("box[2] = first_k_of_all;", "box[2] = first_k_of_all * !MUTATED;"),
    "the first group's x": (
        "group * params.group_c * params.x_stride[1]",
        "group * !MUTATED * params.group_c * params.x_stride[1]",
    ),
    "output channels that are not there": (
        "return first_k + k < params.group_k;",
        "return MUTATED || first_k + k < params.group_k;",
    ),
    "a filter left out": ("own_k < params.group_k && own_e", "own_k < params.group_k - MUTATED && own_e"),
    "a weight left out": ("&& own_e < params.columns)", "&& own_e < params.columns - MUTATED)"),
    "a product dropped": left_out(
        "Multiply::multiply(acc, a[step], dy_operand(dy_stage + params.layout.part_bytes, step)"
    ),
    "x itself for its rest": (
        "Multiply::multiply(acc, rest[step],",
        "Multiply::multiply(acc, MUTATED ? a[step] : rest[step],",
    ),
    "x that is not rounded": (
        "a[step][i] = tf32_operand(a[step][i]);",
        "if (!MUTATED) a[step][i] = tf32_operand(a[step][i]);",
    ),
    "dy that is not rounded": (
        "first[i] = tf32_operand(words[i]);",
        "first[i] = MUTATED ? words[i] : tf32_operand(words[i]);",
    ),
    "a NaN of rests": ("turn == 0 || fabsf", "MUTATED || turn == 0 || fabsf"),
    "a split left out": ("i < params.splits; i += WAYS", "i < params.splits - MUTATED; i += WAYS"),
    "splits of one thread": ("for (int i = 1; i < WAYS; ++i)", "for (int i = 1; i < WAYS * !MUTATED; ++i)"),
    "the first image in all of a row": (
        "from[image * params.stride[0] +",
        "from[image * !MUTATED * params.stride[0] +",
    ),
    "copies pixels behind an image": (
        "quotient(pixel, params.by_plane);\n      pixel -=",
        "quotient(pixel, params.by_plane);\n      if (!MUTATED) pixel -=",
    ),
}

CHOICE_MUTATIONS = {
    "direct with few output channels and few outputs": (
        "taps >= kLeastTapsOfFewChannels)",
        "(MUTATED || taps >= kLeastTapsOfFewChannels))",
    ),
}
CHOICE_OF_WGRAD_MUTATIONS = {
    "copies whatever it takes": (
        "if (kWgradEngine.cycles(problem, op) < kCyclesOfWgrad",
        "if (!MUTATED && kWgradEngine.cycles(problem, op) < kCyclesOfWgrad",
    ),
    "never copies": ("< kCyclesOfWgrad * plan.cycles)", "< kCyclesOfWgrad * (MUTATED ? 1e9 : plan.cycles))"),
}

# Each puts something out of place.
STEM_PLAN_MUTATIONS = {
    "x as if it were aligned": ("address.in % 16 == 0 &&", "(MUTATED || address.in % 16 == 0) &&"),
    "planes of x astray": (
        "&& whole(of.in_stride[1], of.in_channels);",
        "&& (MUTATED || whole(of.in_stride[1], of.in_channels));",
    ),
    "no words in front of a row": ("lead = static_cast<int>((piece", "lead = static_cast<int>(MUTATED ? 0 : (piece"),
    "the last quad as short as its row": (
        "kQuad * plan.row_quads - 1",
        "(MUTATED ? plan.row_terms : kQuad * plan.row_quads) - 1",
    ),
    "boxes of any size": ("&& plan.columns <= kMostBoxSide;", "&& (MUTATED || plan.columns <= kMostBoxSide);"),
    "y as if it were aligned": ("address.out % 16 == 0 &&", "(MUTATED || address.out % 16 == 0) &&"),
    "boxes over the ends of tiles": (
        "tile_p * tile_q % kBoxPixels == 0)",
        "MUTATED || tile_p * tile_q % kBoxPixels == 0)",
    ),
    "pixels of y astray": ("whole(of.out_stride[3], row)", "(MUTATED || whole(of.out_stride[3], row))"),
    "y that ends within 16 bytes": ("row % piece == 0 &&", "(MUTATED || row % piece == 0) &&"),
    "x that ends within 16 bytes": ("of.W % piece == 0 &&", "(MUTATED || of.W % piece == 0) &&"),
    "pieces of as many values of any size": ("piece = 16 / format.bytes", "piece = MUTATED ? 4 : 16 / format.bytes"),
    "no room for x as it comes": ("(format.bytes == 4 ? 0 :", "(MUTATED || format.bytes == 4 ? 0 :"),
    "a tile too few": ("ceil_div(of.Q, tile_q)", "ceil_div(of.Q - (MUTATED && of.Q > 1), tile_q)"),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
}

# Each takes away what others rely on, or leaves out a part of the sum.
STEM_MUTATIONS = {
    "multiplies before x is there": left_out("hopper::barrier_wait(EXACT ? barriers.full"),
    "rounds before x is there": left_out("hopper::barrier_wait(barriers.full,"),
    "overwrites x in use": left_out("hopper::barrier_wait_idly(of_next.empty"),
    "widens over x in use": left_out("hopper::barrier_wait_idly(barriers.empty"),
    "lands where x is read": left_out("hopper::barrier_wait(barriers.rounded, phase"),
    "multiplies before weights are there": left_out("__syncthreads();  // weights are there"),
    "stages where a box is read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<TILE_K"),
    "stores before all is staged": left_out("__syncwarp();  // all of it is staged"),
    "leaves before its boxes are read": left_out("if (lane_id == 0) hopper::bulk_stores_wait_read<0>();  // shared"),
    "stores before the last steps are done": left_out("hopper::wgmma_wait<0>();\n  hopper::wgmma_settle(acc"),
    "adds up a step before it is done": left_out("hopper::wgmma_wait<0>();\n    hopper::wgmma_settle(part"),
    "a product dropped": left_out("Multiply::multiply(part, a, rests + row, 1);"),
    "does not round": left_out("four.y = tf32_operand(four.y);"),
    "Inf is not computed again": ("if (probe == 0) return;", "if (MUTATED || probe == 0) return;"),
    "computes another channel again": (
        "exact_output<T>(params, tile.n, k, p, q)",
        "exact_output<T>(params, tile.n, k - MUTATED * (k > 0), p, q)",
    ),
    "computes another pixel again": (
        "const int in_w = q * of.stride_w - of.pad_w + s",
        "const int in_w = (q - MUTATED * (q > 0)) * of.stride_w - of.pad_w + s",
    ),
}

# Each takes away what others rely on, or leaves out a part of the sum.
TMA_MUTATIONS = {
    "multiplies before x is there": left_out("hopper::barrier_wait(shared.x_full(x.slot)"),
    "multiplies before weights are there": left_out("hopper::barrier_wait(shared.w_full(w.slot)"),
    "overwrites x in use": left_out("hopper::barrier_wait(shared.x_empty(ring.slot)"),
    "overwrites weights in use": left_out("hopper::barrier_wait(shared.w_empty(ring.slot)"),
    "does not wait for its turn": left_out("hopper::barrier_wait(shared.turn(warpgroup), turn)"),
    "gives stages back too early": ("hopper::wgmma_wait<1>();", "if (!MUTATED) hopper::wgmma_wait<1>();"),
    "stages where a box is read": (
        "if (stores) hopper::bulk_stores_wait_read<0>();\n    warpgroup_sync",
        "if (stores && !MUTATED) hopper::bulk_stores_wait_read<0>();\n    warpgroup_sync",
    ),
    "stores before all is staged": left_out("warpgroup_sync(warpgroup);  // all of it is staged"),
    "shifts a tap too far": (
        "params.tap[load.first_tap + t].shift *",
        "(params.tap[load.first_tap + t].shift + MUTATED) *",
    ),
    "mistakes one phase for the other": (
        "load = {static_cast<int16_t>(row),",
        "load = {static_cast<int16_t>(MUTATED ? row ^ 1 : row),",
    ),
    "stages another piece": ("(piece ^ row % 8) * 16", "(piece ^ (MUTATED ? 0 : row % 8)) * 16"),
    "stores what lies between lines": (
        "column < plan.tile_columns && line",
        "(MUTATED || column < plan.tile_columns) && line",
    ),
    "adds up all parts but one": (
        "hopper::add_cluster_4(address, plan.splits)",
        "hopper::add_cluster_4(address, plan.splits - MUTATED)",
    ),
    "multiplies the filter as it is": (
        "const bool flipped = plan.transposed && of.flipped;",
        "const bool flipped = plan.transposed && of.flipped && !MUTATED;",
    ),
    "packs the filter as it is": (
        "params.flipped ? params.R - 1 - r : r",
        "params.flipped && !MUTATED ? params.R - 1 - r : r",
    ),
    "copies before the tile is there": left_out("__syncthreads();  // the tile is there"),
    "reads planes of the first image": ("pixel, c, image, 0, full", "pixel, c, MUTATED ? 0 : image, 0, full"),
    "reads channels of the first groups": (
        "quotient(tile.k, params.by_block_out) * of.in_channels",
        "(MUTATED ? 0 : quotient(tile.k, params.by_block_out)) * of.in_channels",
    ),
    "packs weights of other groups": (
        "exists && of_c == group - quotient(group, params.by_merged) * merged;",
        "exists && (MUTATED || of_c == group - quotient(group, params.by_merged) * merged);",
    ),
}

TMA_WGRAD_MUTATIONS = {
    "multiplies before a stage is there": left_out("hopper::barrier_wait(shared.full(ring.slot)"),
    "overwrites a stage in use": left_out("hopper::barrier_wait(shared.empty(ring.slot)"),
    "gives stages back too early": ("hopper::wgmma_wait<1>();", "if (!MUTATED) hopper::wgmma_wait<1>();"),
    "an odd number of stages by turns": (
        "plan.stages -= plan.stages % 2;",
        "plan.stages -= MUTATED ? 0 : plan.stages % 2;",
    ),
    "leaves sums of no stage as they are": ("if (!keep) {", "if (!keep && !MUTATED) {"),
    "adds up all parts but one": ("part < params.parts;", "part < params.parts - MUTATED;"),
    "takes another tap": ("move_w[i] = s * params.dilation_w;", "move_w[i] = (MUTATED ? 0 : s) * params.dilation_w;"),
    "copies before the tile is there": left_out("__syncthreads();  // the tile is there"),
    "copies dy over x": (
        "to += hopper::copied_bytes(problem.N",
        "to += MUTATED ? 0 : hopper::copied_bytes(problem.N",
    ),
    "copies the first channels only": (
        "if (channel < params.channels && pixel",
        "if (channel < (MUTATED ? 8 : params.channels) && pixel",
    ),
}

# Each puts something out of place.
TMA_PLAN_MUTATIONS = {
    "taps without their dilation": (
        "r / phases * of.dilation_h * plan.pitch",
        "r / phases * (MUTATED ? 1 : of.dilation_h) * plan.pitch",
    ),
    "phases that are one": (
        "int r = phase_h; r < of.R; r += phases",
        "int r = phase_h; r < of.R; r += MUTATED ? 1 : phases",
    ),
    "columns of another tap": ("add(r * of.dilation_h, s", "add(r * (MUTATED ? 1 : of.dilation_h), s"),
    "columns that no map reaches": (
        "if (hopper::can_map(hopper::columns_of(of)) &&",
        "if ((MUTATED || hopper::can_map(hopper::columns_of(of))) &&",
    ),
    "columns where outputs have gaps": (
        "(plan.planes || has_dense_outputs(of))",
        "(MUTATED || plan.planes || has_dense_outputs(of))",
    ),
    "stages that begin anywhere": (
        "round_up(plan.x_bytes, kRowsAligned)",
        "round_up(plan.x_bytes, MUTATED ? 1 : kRowsAligned)",
    ),
    "boxes of any size": ("kMostBoxSide / (strided ? 2 : 1)", "kMostBoxSide / (strided && !MUTATED ? 2 : 1)"),
    "nothing behind the last window": (
        "+ (plan.x_stages - 1) * plan.x_stage_bytes + read);",
        "+ (plan.x_stages - 1) * plan.x_stage_bytes + (MUTATED ? 0 : read));",
    ),
    "a tile too few": (
        "ceil_div(of.Q, plan.tile_columns)",
        "ceil_div(of.Q - (MUTATED && of.Q > 1), plan.tile_columns)",
    ),
    "a line too many": ("/ plan.pitch + 1, of.P,", "/ plan.pitch + 1 + MUTATED, of.P,"),
    "parts of no step": ("plan.splits > plan.x_steps ||", "(plan.splits > plan.x_steps && !MUTATED) ||"),
    "clusters that wait": ("plan.tiles > room / plan.splits", "plan.tiles > (MUTATED ? sms : room) / plan.splits"),
    "x as if it were aligned": ("of.H, of.W, address.in);", "of.H, of.W, MUTATED ? 0 : address.in);"),
    "y as if it were aligned": ("of.P, of.Q, address.out);", "of.P, of.Q, MUTATED ? 0 : address.out);"),
    "planes as if they were aligned": (
        "of.H * of.W, address.in) == 8 &&",
        "of.H * of.W, MUTATED ? 0 : address.in) == 8 &&",
    ),
    "runs over the ends of lines": (
        "plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0",
        "MUTATED || (plan.pitch % 2 == 0 && of.Q % plan.tile_columns == 0)",
    ),
    "the filter as it is": ("return !of.flipped &&", "return (MUTATED || !of.flipped) &&"),
    "the filter not turned": ("if (flipped) r = of.R", "if (flipped && !MUTATED) r = of.R"),
    "no room for channels that are filled up": (
        "packed_row_channels(const Grouped& of) { return round_up(of.in_channels, 8)",
        "packed_row_channels(const Grouped& of) { return round_up(of.in_channels, MUTATED ? 1 : 8)",
    ),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
    "tiles of several groups": (
        "of.groups > 1 && of.block_out % plan.shape.channels != 0",
        "!MUTATED && of.groups > 1 && of.block_out % plan.shape.channels != 0",
    ),
    "parts of merged groups": (
        "!may_split(plan.shape) || of.merged()",
        "!may_split(plan.shape) || (!MUTATED && of.merged())",
    ),
}

TMA_WGRAD_PLAN_MUTATIONS = {
    "an odd number of stages by turns": (
        "if (channels == 64) plan.stages",
        "if (channels == 64 && !MUTATED) plan.stages",
    ),
    "more stages than there is room for": ("(kSharedBytes - barriers) /", "(kSharedBytes + (MUTATED ? 16384 : 0)) /"),
    "chains of any length": ("least = ceil_div(pixels,", "least = MUTATED ? 1 : ceil_div(pixels,"),
    "sums of one warpgroup": ("return plan.channels == 64 ? 2 : 1;", "return plan.channels == 64 && !MUTATED ? 2 : 1;"),
    "a tile too few": (
        "ceil_div(taps * plan.blocks_c, blocks)",
        "ceil_div(taps * plan.blocks_c - (MUTATED && taps > 1), blocks)",
    ),
    "whole stages only": (
        "(ceil_div(pixels, kStagePixels))",
        "(std::max<int64_t>(pixels - (MUTATED ? 63 : 0) + 63, 64) / 64)",
    ),
    "x as if it were aligned": ("problem.H, problem.W, address.x);", "problem.H, problem.W, MUTATED ? 0 : address.x);"),
    "dy as if it were aligned": (
        "problem.P, problem.Q, address.dy);",
        "problem.P, problem.Q, MUTATED ? 0 : address.dy);",
    ),
    "any channels of dy": (
        "is_in_place(problem.y_stride, problem.N, problem.K,",
        "is_in_place(problem.y_stride, problem.N, MUTATED ? 8 : problem.K,",
    ),
    "planes with gaps": ("if (!in_place_x && !can_copy", "if (!MUTATED && !in_place_x && !can_copy"),
    "strides that are never taken": (
        "{p.W, p.Q, p.S, taken_stride(p.stride_w, p.Q),",
        "{p.W, p.Q, p.S, MUTATED ? p.stride_w : taken_stride(p.stride_w, p.Q),",
    ),
    "filters that no map reaches": (
        "if (!hopper::can_map(columns_of_x(problem)))",
        "if (!MUTATED && !hopper::can_map(columns_of_x(problem)))",
    ),
    "not the best": ("plan.cycles >= best.cycles", "(MUTATED || plan.cycles >= best.cycles)"),
}
