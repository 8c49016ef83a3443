// C entry points around engines of one library.
#include "problem_fields.h"

static const modelnew::Engine* const kEngines[] = {ENGINES};
static modelnew::Operator as_operator(int op) { return static_cast<modelnew::Operator>(op); }
extern "C" {
int engine_number = 0;  // of kEngines, that is asked
const char* plan_refusal(int op, const int64_t* fields) {
  return kEngines[engine_number]->refusal(make_problem(fields), as_operator(op));
}
const char* plan_describe(int op, const int64_t* fields) {
  static char text[512];
  kEngines[engine_number]->describe(make_problem(fields), as_operator(op), text, sizeof text);
  return text;
}
// As planned: -1 if the engine refuses it, else the error.
int run_wished(int op, const int64_t* fields, void* const* pointers, const int*, int seed) {
  const modelnew::Problem problem = make_problem(fields);
  if (kEngines[engine_number]->refusal(problem, as_operator(op)) != nullptr) return -1;
  simt::shuffler.seed(seed);
  Workspace workspace(kEngines[engine_number]->workspace_bytes(problem, as_operator(op), modelnew::Pointers{}));
  const modelnew::Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], workspace.data()};
  const int code = kEngines[engine_number]->launch(as_operator(op), problem, all, nullptr);
  return code == 0 && !workspace.intact() ? -2 : code;
}
}
