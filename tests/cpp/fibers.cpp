// The bodies of src/tree as fibers; and that a divergent collective does abort.
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "cases.h"
#include "groups.h"

using namespace kdtree::test;

// Runs body in a child, which must abort and say why.
static void expect_abort(const char *what, const std::function<void(FiberGroup &)> &body,
                         const char *why = "divergent collective") {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    run_fibers(body);
    _exit(0);
  }
  close(ends[1]);
  std::string message(256, '\0');
  const ssize_t length = read(ends[0], message.data(), message.size());
  message.resize(length > 0 ? length : 0);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && message.find(why) == 0) return;
  std::fprintf(stderr, "%s: expected an abort, got status %d, \"%s\"\n", what, status,
               message.c_str());
  std::exit(1);
}

int main(int argc, char **argv) {
  expect_abort("a lane that leaves early", [](FiberGroup &group) {
    if (group.lane() == 5) return;
    group.sync();
  });
  expect_abort("two kinds of collective", [](FiberGroup &group) {
    if (group.lane() < 16)
      group.ballot(true);
    else
      group.sync();
  });
  expect_abort("two places of one kind", [](FiberGroup &group) {
    if (group.lane() == 31)
      group.sync();
    else
      group.sync();
  });
  for (int owners : {0, 2}) {
    int place = 0;
    expect_abort(
        "a value that not one lane hands out",
        [&](FiberGroup &group) { group.hand_out(group.lane() < owners, 1, place); },
        "hand_out by ");
  }
  all_cases(argc > 1 ? std::atoi(argv[1]) : 300, run_fibers);
  std::puts("fibers: ok");
}
