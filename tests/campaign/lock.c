/* `lock FD`: lock an open file while any process holds it open; 1 where another has it. For jobs in containers. */
#include <stdlib.h>
#include <sys/file.h>

int main(int count, char **words) { return count < 2 || flock(atoi(words[1]), LOCK_EX | LOCK_NB) != 0; }
