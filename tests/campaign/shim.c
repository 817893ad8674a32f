/*
 * Preloaded into the campaign's controllers and clients: fails, tears or dies at the nth disk operation below a folder,
 * and sets the wall clock off. Orders lie in the file that $CAMPAIGN_SHIM names (struct Orders, mapped); without the
 * variable, or with zeros in the file, nothing differs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { WRITE = 1, SYNC = 2, NAME = 4, CREATE = 8 };

typedef struct {
    int64_t clock_s;     /* added to the wall clock */
    int32_t mask;        /* operations that count */
    int32_t countdown;   /* operations that still succeed */
    int32_t left;        /* operations that fail then */
    int32_t error;       /* errno; -1: die by SIGKILL; -2: write half, then die */
    int32_t seen, failed;
    char folder[256];
} Orders;

static volatile Orders *orders;
static char mapped[512];

static volatile Orders *given(void) {
    const char *path = getenv("CAMPAIGN_SHIM");
    if (!path) return NULL;
    if (orders && !strcmp(path, mapped)) return orders;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    int fd = real(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *at = mmap(NULL, sizeof(Orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return NULL;
    snprintf(mapped, sizeof mapped, "%s", path);
    return orders = at;
}

static int below(volatile Orders *o, const char *path) {
    const char *folder = (const char *)o->folder;
    return path && *folder && !strncmp(path, folder, strlen(folder));
}

/* 0: go on; else what is to happen (errno, -1, -2). */
static int verdict(int kind, int fd, const char *path) {
    volatile Orders *o = given();
    if (!o || !(o->mask & kind)) return 0;
    char name[64], target[512];
    if (!path) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(name, target, sizeof target - 1);
        if (n < 0) return 0;
        target[n] = 0;
        path = target;
    }
    if (!below(o, path)) return 0;
    __sync_fetch_and_add((int32_t *)&o->seen, 1);
    if (__sync_fetch_and_sub((int32_t *)&o->countdown, 1) > 0) return 0;
    if (__sync_fetch_and_sub((int32_t *)&o->left, 1) <= 0) return 0;
    __sync_fetch_and_add((int32_t *)&o->failed, 1);
    if (o->error == -1) kill(getpid(), SIGKILL);
    return o->error;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define FAIL(v) do { if ((v) > 0) { errno = (v); return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    int v = verdict(WRITE, fd, NULL);
    FAIL(v);
    if (v == -2) { real(fd, data, n / 2); kill(getpid(), SIGKILL); }
    return real(fd, data, n);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(pwrite64);
    int v = verdict(WRITE, fd, NULL);
    FAIL(v);
    if (v == -2) { real(fd, data, n / 2, at); kill(getpid(), SIGKILL); }
    return real(fd, data, n, at);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return pwrite64(fd, data, n, at); }
int fsync(int fd) { REAL(fsync); int v = verdict(SYNC, fd, NULL); FAIL(v); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); int v = verdict(SYNC, fd, NULL); FAIL(v); return real(fd); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); int v = verdict(WRITE, fd, NULL); FAIL(v); return real(fd, n); }
int rename(const char *a, const char *b) { REAL(rename); int v = verdict(NAME, -1, b); FAIL(v); return real(a, b); }
int renameat(int x, const char *a, int y, const char *b) {
    REAL(renameat); int v = verdict(NAME, -1, b); FAIL(v); return real(x, a, y, b);
}
int link(const char *a, const char *b) { REAL(link); int v = verdict(NAME, -1, b); FAIL(v); return real(a, b); }
int linkat(int x, const char *a, int y, const char *b, int f) {
    REAL(linkat); int v = verdict(NAME, -1, b); FAIL(v); return real(x, a, y, b, f);
}
int unlink(const char *a) { REAL(unlink); int v = verdict(NAME, -1, a); FAIL(v); return real(a); }

#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        REAL(name);                                                                    \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        if (flags & O_CREAT) { int v = verdict(CREATE, -1, path); FAIL(v); }           \
        return real(path, flags, mode);                                                \
    }
OPEN(open)
OPEN(open64)

static int64_t ahead(void) { volatile Orders *o = given(); return o ? o->clock_s : 0; }

int clock_gettime(clockid_t which, struct timespec *out) {
    REAL(clock_gettime);
    int done = real(which, out);
    if (!done && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) out->tv_sec += ahead();
    return done;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    REAL(gettimeofday);
    int done = real(out, zone);
    if (!done) out->tv_sec += ahead();
    return done;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
