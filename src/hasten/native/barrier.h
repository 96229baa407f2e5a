// Where the threads of a pass wait for each other, some hundreds of times a pass. Waits are short as
// the shares are even, so a thread looks for a moment before it sleeps. OpenMP's own barrier looks
// for milliseconds: with another program on one of the cores, the thread that waits kept it from
// the other core, and a pass took a hundred times as long.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace hasten {

class Barrier {
 public:
  // All of `threads` threads have come when it returns.
  void wait(int64_t threads) {
    if (threads == 1) return;
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_seq_cst);
      if (asleep_.load(std::memory_order_seq_cst)) wake();
      return;
    }
    for (int i = 0; i < LOOKS; ++i) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) sleep(round);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  static constexpr int LOOKS = 2000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

#if defined(__linux__)
  void sleep(uint32_t round) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&round_), FUTEX_WAIT_PRIVATE, round, nullptr);
  }
  void wake() {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&round_), FUTEX_WAKE_PRIVATE, INT32_MAX);
  }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int32_t> asleep_{0};
};

}  // namespace hasten
