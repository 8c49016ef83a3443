// Behind "using namespace" of an engine's: columns as both engines have them.

// What is wrong with columns, or nothing: of each axis they number its outputs, each where the convolution has it, in
// bounds that maps have.
static std::string fault_of_columns(const hopper::Columns& columns, const hopper::Axis (&axes)[2]) {
  const auto is_corner = [](int64_t value) { return value >= -128 && value <= 127; };
  for (int i = 0; i < 2; ++i) {
    const hopper::Axis& axis = axes[i];
    const int step = columns.steps[i];
    if (!is_corner(columns.first[i]) || !is_corner(columns.last[i])) return "corners that maps do not have";
    if (step < 1 || step > 8) return "steps that maps do not have";
    if (int64_t{axis.taps - 1} * axis.dilation > 255) return "taps that columns do not reach";
    int outputs = 0;
    for (int64_t at = columns.first[i]; at < int64_t{axis.size} + columns.last[i]; at += step, ++outputs)
      if (at != int64_t{outputs} * axis.stride - axis.pad) return "a column elsewhere in x";
    if (outputs != axis.outputs) return "columns that are not as many as outputs";
  }
  return "";
}
// Whether boxes take a tensor of pixels, whose address is in bytes.
static bool has_pixels_for_boxes(const int64_t (&stride)[4], uint64_t address, const int64_t (&sizes)[4]) {
  bool has = stride[1] == 1 && sizes[1] % 8 == 0 && address % 16 == 0;
  for (int i : {0, 2, 3}) has &= sizes[i] == 1 || (stride[i] > 0 && stride[i] % 8 == 0);
  return has;
}
