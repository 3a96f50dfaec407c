// The bodies of src/tree as threads under ThreadSanitizer; and that it does see a missing sync().
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "cases.h"
#include "groups.h"

using namespace kdtree::test;

// Every lane writes a word and reads its neighbour's.
static void neighbours(bool sync, bool ballot) {
  int words[kLanes] = {};
  std::atomic<int> sum = 0;
  run_threads([&](ThreadGroup &group) {
    words[group.lane()] = group.lane();
    if (sync) group.sync();
    if (ballot) group.ballot(true);  // a collective, but it orders no memory
    sum += words[(group.lane() + 1) % kLanes];
  });
}

// This program again with an argument; whether ThreadSanitizer reported a race in it.
static bool races(const char *self, const char *what) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("TSAN_OPTIONS", "exitcode=66:log_path=/dev/null", 1);
    execl(self, self, what, nullptr);
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  if (code == 0 || code == 66) return code == 66;
  std::fprintf(stderr, "%s: expected exit status 0 or 66, got %d\n", what, code);
  std::exit(1);
}

int main(int argc, char **argv) {
  const std::string what = argc > 1 ? argv[1] : "25";
  if (what == "no-sync") return neighbours(false, false), 0;
  if (what == "ballot-only") return neighbours(false, true), 0;
  if (what == "synced") return neighbours(true, true), 0;

  if (!races("/proc/self/exe", "no-sync") || !races("/proc/self/exe", "ballot-only") ||
      races("/proc/self/exe", "synced")) {
    std::fprintf(stderr, "ThreadSanitizer does not tell a missing sync() from one that is there\n");
    return 1;
  }
  all_cases(std::atoi(what.c_str()), run_threads);
  std::puts("threads: ok");
}
