// Checks that tma and tma_wgrad share. Included behind "using namespace" of an engine.

// Columns of a map number the outputs of each axis, where the convolution has them, within the bounds of maps.
static bool are_columns(const hopper::Columns& columns, const hopper::Axis (&axes)[2]) {
  const auto is_corner = [](int64_t value) { return value >= -128 && value <= 127; };
  for (int i = 0; i < 2; ++i) {
    const hopper::Axis& axis = axes[i];
    const int step = columns.steps[i];
    if (!is_corner(columns.first[i]) || !is_corner(columns.last[i]) || step < 1 || step > 8) return false;
    if (int64_t{axis.taps - 1} * axis.dilation > 255) return false;
    int outputs = 0;
    for (int64_t at = columns.first[i]; at < int64_t{axis.size} + columns.last[i]; at += step, ++outputs)
      if (at != int64_t{outputs} * axis.stride - axis.pad) return false;
    if (outputs != axis.outputs) return false;
  }
  return true;
}

// Whether boxes take a tensor of pixels, whose address is in bytes.
static bool has_pixels_for_boxes(const int64_t (&stride)[4], uint64_t address, const int64_t (&sizes)[4]) {
  return stride[1] == 1 && sizes[1] % 8 == 0 && address % 16 == 0 && steps_of_boxes(stride, sizes, 8, {0, 2, 3});
}

// Whether rows of pixels follow one another, one step after the other.
static bool has_lines(const int64_t (&stride)[4], int rows, int columns) {
  return columns == 1 || rows == 1 || stride[2] == columns * stride[3];
}

// Whether rows of planes follow one another.
[[maybe_unused]] static bool has_planes(const int64_t (&stride)[4], int rows, int columns) {
  return (columns == 1 || stride[3] == 1) && (rows == 1 || stride[2] == columns);
}
