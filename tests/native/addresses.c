/* The functions of macOS 14.4 that sleeping.h looks for, made of futexes: with them the bells of the portable build can be
 * tried on Linux as they run on macOS. Counts calls, so that a test sees that they were used. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SHARED = 1, MACH_ABSOLUTE_TIME = 32 };
static _Atomic long waits, wakes;

static void check(size_t size, uint32_t flags) {
    if (size != 4 || flags != SHARED) abort(); /* both sides must agree on these */
}

int os_sync_wait_on_address_with_timeout(void *address, uint64_t value, size_t size, uint32_t flags, uint32_t clock,
                                         uint64_t ns) {
    check(size, flags);
    if (clock != MACH_ABSOLUTE_TIME || ns == 0) {
        errno = EINVAL;
        return -1;
    }
    struct timespec left = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    waits++;
    if (syscall(SYS_futex, address, FUTEX_WAIT, (uint32_t)value, &left, NULL, 0) == 0 || errno == EAGAIN) return 0;
    return -1;
}

int os_sync_wake_by_address_all(void *address, size_t size, uint32_t flags) {
    check(size, flags);
    wakes++;
    if (syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, NULL, NULL, 0) > 0) return 0;
    errno = ENOENT;
    return -1;
}

__attribute__((destructor)) static void tell(void) { fprintf(stderr, "%ld waits, %ld wakes\n", waits, wakes); }
