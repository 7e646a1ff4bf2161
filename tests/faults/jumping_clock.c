/* LD_PRELOAD: the wall clock is wrong by the seconds in the file that JUMPING_CLOCK names (eight bytes, re-read by mapping).
 * The monotonic clocks are right. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t offset_seconds(void) {
    static volatile int64_t *mapped;
    if (!mapped) {
        int file = open(getenv("JUMPING_CLOCK"), O_RDONLY);
        if (file < 0) abort();
        mapped = mmap(NULL, sizeof *mapped, PROT_READ, MAP_SHARED, file, 0);
        if (mapped == MAP_FAILED) abort();
    }
    return *mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_seconds();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
