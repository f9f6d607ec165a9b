/* Preloaded into a process: its k-th call that changes a file, counted from arm(), kills it or fails.

   how: 0 kills before the call; 1 kills in the middle of a write; another number is the errno of this call and of all later
   ones if `for_good`, of this one alone if not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <unistd.h>

static int armed, k, how, for_good, calls;

void arm(int k_, int how_, int for_good_) { k = k_, how = how_, for_good = for_good_, calls = 0, armed = 1; }
int counted(void) { armed = 0; return calls; }

static int is_failing(void) {
    if (!armed) return 0;
    int n = calls++;
    if (n != k && !(for_good && n > k)) return 0;
    if (how == 0) kill(getpid(), SIGKILL);
    if (how == 1) return 1;
    errno = how;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(name, args, half, whole) \
    ssize_t name args { \
        if (!is_failing()) return NEXT(name) whole; \
        if (how != 1) return -1; \
        NEXT(name) half; \
        kill(getpid(), SIGKILL); \
        return -1; \
    }
#define CHANGES(name, args, whole) \
    int name args { \
        if (!is_failing()) return NEXT(name) whole; \
        if (how == 1) kill(getpid(), SIGKILL); \
        return -1; \
    }
WRITES(write, (int fd, const void *data, size_t size), (fd, data, size / 2), (fd, data, size))
WRITES(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size / 2, at), (fd, data, size, at))
WRITES(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size / 2, at), (fd, data, size, at))
CHANGES(fsync, (int fd), (fd))
CHANGES(fdatasync, (int fd), (fd))
CHANGES(ftruncate, (int fd, off_t size), (fd, size))
CHANGES(ftruncate64, (int fd, off64_t size), (fd, size))
CHANGES(unlink, (const char *path), (path))
CHANGES(rename, (const char *from, const char *to), (from, to))
CHANGES(link, (const char *from, const char *to), (from, to))
CHANGES(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int mode = va_arg(rest, int); \
        va_end(rest); \
        if ((flags & O_CREAT) && is_failing()) { \
            if (how == 1) kill(getpid(), SIGKILL); \
            return -1; \
        } \
        return NEXT(name)(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
