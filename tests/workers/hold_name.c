/* Preloaded. The thread of a gloo group stops for one second when it copies the name "ALLTOALL" of a completed collective, as the
   scheduler might stop it. All other copies are immediate. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int in_run_loop(void *caller) {
    Dl_info found;
    return dladdr(caller, &found) && found.dli_sname && strstr(found.dli_sname, "ProcessGroupGloo7runLoop");
}

void *memcpy(void *to, const void *from, size_t size) {
    if ((size == 8 || size == 9) && !strncmp(from, "ALLTOALL", 8) && in_run_loop(__builtin_return_address(0))) {
        struct timespec second = {1, 0};
        (void)!write(2, "held\n", 5);
        nanosleep(&second, 0);
    }
    return memmove(to, from, size); /* needs -fno-builtin, or the compiler may call memcpy here */
}
