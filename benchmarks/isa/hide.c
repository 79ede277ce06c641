/* Loaded before everything else (LD_PRELOAD): CPUID answers that there are no AVX-512, AMX and
 * AVX-VNNI instructions.
 *
 * The kernel can be asked to make CPUID fault (arch_prctl(2), ARCH_CPUID; processors of Intel, and
 * virtual machines that pass it on). Where it cannot, libraries have an instruction in CPUID's
 * place that faults everywhere (patched.py; compiled with -DPATCHED). The handler executes CPUID,
 * with faulting off, takes the bits away and goes on behind it. Threads and forked processes
 * inherit the setting; what is executed anew loads this library anew. Others that install a handler
 * of the same signal are told that they did, and get the signals that are not CPUID's.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

#ifdef PATCHED
#define FAULT SIGILL
#define FIRST 0xd6
static int faulting(int on) { return (void)on, 0; }
#else
#define FAULT SIGSEGV
#define FIRST 0x0f
static int faulting(int on) { return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, !on); }
#endif

static struct sigaction others = {.sa_handler = SIG_DFL};
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);

static void without(unsigned leaf, unsigned sub, unsigned *a, unsigned *b, unsigned *c,
                    unsigned *d) {
  if (leaf == 7 && sub == 0) {
    /* f, dq, ifma, pf, er, cd, bw, vl; vbmi, vbmi2, vnni, bitalg, vpopcntdq; 4vnniw, 4fmaps,
     * vp2intersect, amx_bf16, fp16, amx_tile, amx_int8 */
    *b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
    *c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    *d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
  } else if (leaf == 7 && sub == 1) {
    /* avx_vnni, avx512_bf16, amx_fp16, avx_ifma; avx_vnni_int8, avx_ne_convert, amx_complex,
     * avx_vnni_int16, avx10 */
    *a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23);
    *d &= ~(1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19);
  } else if (leaf == 0xd && sub == 0) {
    *a &= ~(7u << 5 | 3u << 17); /* opmask, upper halves, upper registers; tiles */
  } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
    *a = *b = *c = *d = 0;
  }
}

static void answer(int sig, siginfo_t *info, void *given) {
  greg_t *r = ((ucontext_t *)given)->uc_mcontext.gregs;
  const unsigned char *at = (const unsigned char *)r[REG_RIP];
#ifdef PATCHED
  int executed = info->si_code > 0;
#else /* a fault at an address is none of CPUID's, and its code may not be readable */
  int executed = info->si_code > 0 && info->si_addr == NULL;
#endif
  int cpuid = executed && at != NULL && at[0] == FIRST && at[1] == 0xa2;
  if (cpuid) {
    unsigned a, b, c, d, leaf = (unsigned)r[REG_RAX], sub = (unsigned)r[REG_RCX];
    faulting(0);
    __cpuid_count(leaf, sub, a, b, c, d);
    faulting(1);
    without(leaf, sub, &a, &b, &c, &d);
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
  } else if (others.sa_flags & SA_SIGINFO) {
    others.sa_sigaction(sig, info, given);
  } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
    others.sa_handler(sig);
  } else { /* as if there were no handler: the instruction faults again */
    struct sigaction none = {.sa_handler = SIG_DFL};
    real_sigaction(FAULT, &none, NULL);
  }
}

int sigaction(int sig, const struct sigaction *to, struct sigaction *from) {
  if (real_sigaction == NULL) real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  if (sig != FAULT) return real_sigaction(sig, to, from);
  struct sigaction before = others;
  if (to != NULL) others = *to;
  if (from != NULL) *from = before;
  return 0;
}

sighandler_t signal(int sig, sighandler_t to) {
  struct sigaction now = {.sa_handler = to, .sa_flags = SA_RESTART}, before;
  return sigaction(sig, &now, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction mine = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (real_sigaction == NULL) real_sigaction = dlsym(RTLD_NEXT, "sigaction");
  sigemptyset(&mine.sa_mask);
  real_sigaction(FAULT, &mine, NULL);
  if (faulting(1) != 0) {
    static const char why[] = "CPUID cannot be made to fault on this processor\n";
    if (write(2, why, sizeof why - 1) < 0) _exit(125);
    _exit(125);
  }
}
