#include "pool.h"

#include <stdlib.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "kernels.h"
#include "simd.h"

#if MATRIX_UNIT
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

Pool pool;

API void use_pool(void* parallel, void* thread, void* threads) {
  pool = {(decltype(pool.parallel))parallel, (decltype(pool.thread))thread, (decltype(pool.threads))threads};
}

thread_local Meeting* meeting = nullptr;

// A moment of a thread that waits awake.
static inline void moment() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Asleep until `word` is no longer `value`, or for no reason.
static void sleep_while(unsigned* word, unsigned value) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  sched_yield();
#endif
}

void Meeting::wait(int threads) {
  constexpr int AWAKE = 2000;  // moments: about a hundred microseconds, longer than a share, far shorter than a time slice
  unsigned now = __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&come, 1, __ATOMIC_ACQ_REL) == threads) {
    __atomic_store_n(&come, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&turn, now + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    return;
  }
  for (int i = 0; i < AWAKE; i++) {
    if (__atomic_load_n(&turn, __ATOMIC_ACQUIRE) != now) return;
    moment();
  }
  __atomic_fetch_add(&asleep, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&turn, __ATOMIC_SEQ_CST) == now) sleep_while(&turn, now);
  __atomic_fetch_sub(&asleep, 1, __ATOMIC_SEQ_CST);
}

void* scratch(Place place, long bytes) {
  static thread_local struct Room {
    void* data = nullptr;
    long bytes = 0;
    ~Room() { free(data); }
  } rooms[PLACES];
  Room& room = rooms[place];
  if (bytes > room.bytes) {
    free(room.data);
    room.bytes = (bytes + 4095) / 4096 * 4096;
    room.data = aligned_alloc(64, room.bytes);
  }
  return room.data;
}

#if MATRIX_UNIT
// Whether there is AMX for bfloat16 and bytes, and the kernel lets this process use its tiles.
static bool has_matrix_unit() {
  constexpr unsigned TILES = 1u << 24, BFLOATS = 1u << 22, BYTES = 1u << 25;
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (TILES | BFLOATS | BYTES)) return false;
  return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}
#endif

// Whether these are to be taken where the processor runs others, too: widened products are faster on Intel's alone.
API int suits() {
#if defined(WIDENED)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return 1;
#endif
}

// Whether this processor has the instructions that this library was compiled for.
API int supported() {
#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
  const unsigned long atomics = 1 << 8, dot_products = 1 << 20;  // bits of HWCAP: what ARMv8.2 with dotprod brings
  return (getauxval(AT_HWCAP) & atomics) && (getauxval(AT_HWCAP) & dot_products);
#elif defined(__aarch64__)
  return 1;
#else
  __builtin_cpu_init();
#if MATRIX_UNIT
  if (!has_matrix_unit()) return 0;
#endif
#if DOT_INSTRUCTIONS
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#endif
}
