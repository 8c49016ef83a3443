// C entry points around engines of one library.
#include "run.h"

static const Engine* const engines[] = {ENGINES};
extern "C" {
int engine_number = 0;  // of these, which is asked
const char* plan_refusal(int op, const int64_t* fields) {
  return engines[engine_number]->refusal(make_problem(fields), as_operator(op));
}
const char* plan_describe(int op, const int64_t* fields) {
  static char text[512];
  engines[engine_number]->describe(make_problem(fields), as_operator(op), text, sizeof text);
  return text;
}
// As planned: -1 if the engine refuses it, else the error.
int run_wished(int op, const int64_t* fields, void* const* pointers, const int*, int seed) {
  const Problem problem = make_problem(fields);
  if (engines[engine_number]->refusal(problem, as_operator(op)) != nullptr) return -1;
  simt::shuffler.seed(seed);
  Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], nullptr};
  Workspace workspace(engines[engine_number]->workspace_bytes(problem, as_operator(op), all));
  all.workspace = workspace.data();
  const int code = engines[engine_number]->launch(as_operator(op), problem, all, nullptr);
  return unless_overrun(code, workspace);
}
}
