/* Threads, a signal handler and the C library's own loops. */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static volatile uint64_t sink;

static int compare(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void work(unsigned seed) {
    char *words[512];
    for (int i = 0; i < 512; i++) {
        words[i] = malloc(16);
        seed = seed * 1103515245 + 12345;
        for (int j = 0; j < 15; j++) words[i][j] = 'a' + (seed >> j) % 26;
        words[i][15] = 0;
    }
    qsort(words, 512, sizeof *words, compare);
    for (int i = 0; i < 512; i++) sink += words[i][0], free(words[i]);
}

static void on_alarm(int signal) {
    (void)signal;
    for (int i = 0; i < 300000; i++) sink += i;
}

static void *thread(void *end) {
    for (unsigned i = 0; time(NULL) < *(time_t *)end; i++) work(i);
    return NULL;
}

int main(void) {
    time_t end = time(NULL) + 14;
    pthread_t other;
    struct itimerval every = {{0, 5000}, {0, 5000}};
    signal(SIGALRM, on_alarm);
    setitimer(ITIMER_REAL, &every, NULL);
    pthread_create(&other, NULL, thread, &end);
    thread(&end);
    return pthread_join(other, NULL);
}
