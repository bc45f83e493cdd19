/* Lets one socket call of this process fail, act on one byte, or find the end; see socket_faults.py.

   Preloaded: read, readv, recv, recvmsg, write, writev, send, sendmsg, connect, accept4,
   socket and setsockopt of Internet sockets are counted while armed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, END = -2 };
enum { READ = 1, WRITE, CONNECT, ACCEPT, SOCKET, SETSOCKOPT };

static atomic_long seen, at;
static int action;
static char kinds[1 << 16];

void faults_arm(long number, int what) { action = what; seen = 0; at = number; }
void faults_disarm(void) { at = 0; }
long faults_seen(void) { return seen; }
int faults_kind(long number) { return number < (long)sizeof kinds ? kinds[number] : 0; }

static int is_inet(int fd) {
    int domain = 0;
    socklen_t size = sizeof domain;
    int kept = errno;
    int found = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_INET;
    errno = kept;
    return found;
}

/* What this call must do: 0 as always, an errno, SHORT or END. */
static int due(int kind) {
    if (!at) return 0;
    long number = ++seen;
    if (number < (long)sizeof kinds) kinds[number] = kind;
    return number == at ? action : 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL_OR(kind, fd) \
    int now = is_inet(fd) ? due(kind) : 0; \
    if (now > 0) { errno = now; return -1; }

ssize_t read(int fd, void *to, size_t n) {
    REAL(ssize_t, read, int, void *, size_t);
    FAIL_OR(READ, fd)
    return now == END ? 0 : real(fd, to, now == SHORT && n ? 1 : n);
}
ssize_t recv(int fd, void *to, size_t n, int flags) {
    REAL(ssize_t, recv, int, void *, size_t, int);
    FAIL_OR(READ, fd)
    return now == END ? 0 : real(fd, to, now == SHORT && n ? 1 : n, flags);
}
ssize_t readv(int fd, const struct iovec *to, int count) {
    REAL(ssize_t, readv, int, const struct iovec *, int);
    FAIL_OR(READ, fd)
    if (now == END) return 0;
    return now == SHORT ? read(fd, to[0].iov_base, 1) : real(fd, to, count);
}
ssize_t recvmsg(int fd, struct msghdr *to, int flags) {
    REAL(ssize_t, recvmsg, int, struct msghdr *, int);
    FAIL_OR(READ, fd)
    return now == END ? 0 : real(fd, to, flags);
}
ssize_t write(int fd, const void *from, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    FAIL_OR(WRITE, fd)
    return real(fd, from, now == SHORT && n ? 1 : n);
}
ssize_t send(int fd, const void *from, size_t n, int flags) {
    REAL(ssize_t, send, int, const void *, size_t, int);
    FAIL_OR(WRITE, fd)
    return real(fd, from, now == SHORT && n ? 1 : n, flags);
}
ssize_t writev(int fd, const struct iovec *from, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    FAIL_OR(WRITE, fd)
    struct iovec first = {from[0].iov_base, 1};
    return now == SHORT && from[0].iov_len ? real(fd, &first, 1) : real(fd, from, count);
}
ssize_t sendmsg(int fd, const struct msghdr *from, int flags) {
    REAL(ssize_t, sendmsg, int, const struct msghdr *, int);
    FAIL_OR(WRITE, fd)
    return real(fd, from, flags);
}
int connect(int fd, const struct sockaddr *to, socklen_t size) {
    REAL(int, connect, int, const struct sockaddr *, socklen_t);
    FAIL_OR(CONNECT, fd)
    return real(fd, to, size);
}
int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
    REAL(int, accept4, int, struct sockaddr *, socklen_t *, int);
    FAIL_OR(ACCEPT, fd)
    return real(fd, from, size, flags);
}
int socket(int domain, int type, int protocol) {
    REAL(int, socket, int, int, int);
    int now = domain == AF_INET ? due(SOCKET) : 0;
    if (now > 0) { errno = now; return -1; }
    return real(domain, type, protocol);
}
int setsockopt(int fd, int level, int name, const void *value, socklen_t size) {
    REAL(int, setsockopt, int, int, int, const void *, socklen_t);
    FAIL_OR(SETSOCKOPT, fd)
    return real(fd, level, name, value, size);
}
