// Keeps the part that the wheel brings to what systems have since glibc 2.28 and GCC 8's libstdc++ (manylinux_2_28), though a newer GCC
// compiles it. Included before all else.
#pragma once

#ifdef FLOW_MANYLINUX

// Newer ones are asked whether there is one thread only: here the answer is no.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

#include <bits/c++config.h>
// Waits for a time of the steady clock are measured by the system's instead.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK

#if defined(__x86_64__)
#define FLOW_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FLOW_GLIBC "GLIBC_2.17"
#endif
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@" FLOW_GLIBC);
__asm__(".symver pthread_mutex_timedlock, pthread_mutex_timedlock@" FLOW_GLIBC);
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");

#include <sstream>
// C++20's, which the library does not have before GCC 11.
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

#endif
