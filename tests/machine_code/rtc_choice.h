#include "divisor.cuh"
namespace modelnew {
template <int COUNT>
const Engine* first_of(const Engine* const (&)[COUNT], const Problem&, Operator, Memo<const Engine*>&) {
  return nullptr;
}
inline const char* reason_against(const Engine&, const Problem&, Operator) { return ""; }
}
