// How long after its end a process with an io_uring has operations under way, as two ways show it (pause.md):
//   cc -O1 -o ring-end ring-end.c && ./ring-end FILE FIXED LOAD COUNT
// FIXED 1: a pipe that is registered with the ring beside the file comes to its end. FIXED 0: a lock of the file, which is not registered, is free.
// LOAD 1: eight writes of 64 KiB past the cache are under way all the time. In the environment: DEFER=1 or COOP=1 are the ring's flags, ALSO=1
// registers another open file of the same image.
#define _GNU_SOURCE
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <sys/uio.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <signal.h>
#include <time.h>
#include <poll.h>
#include <errno.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec*1e3+t.tv_nsec/1e6;}
static void child(const char*path,int fixed,int load,int pw,int lockfd){
  struct io_uring_params p;memset(&p,0,sizeof p); if(getenv("DEFER")) p.flags=IORING_SETUP_SINGLE_ISSUER|IORING_SETUP_DEFER_TASKRUN; else if (getenv("COOP")) p.flags=IORING_SETUP_COOP_TASKRUN;
 if(getenv("SIZED")){p.flags|=IORING_SETUP_CQSIZE;p.cq_entries=2048;}
  int r=syscall(__NR_io_uring_setup,64,&p); if(r<0){perror("setup");_exit(1);}
  char*sq=mmap(0,p.sq_off.array+p.sq_entries*4,3,MAP_SHARED|MAP_POPULATE,r,IORING_OFF_SQ_RING);
  char*cq=mmap(0,p.cq_off.cqes+p.cq_entries*sizeof(struct io_uring_cqe),3,MAP_SHARED|MAP_POPULATE,r,IORING_OFF_CQ_RING);
  struct io_uring_sqe*sqes=mmap(0,p.sq_entries*sizeof*sqes,3,MAP_SHARED|MAP_POPULATE,r,IORING_OFF_SQES);
  int fd=lockfd;
  if(fixed){int f[2]={fd,pw}; if(syscall(__NR_io_uring_register,r,IORING_REGISTER_FILES,f,2)){perror("reg");_exit(1);}}
  if(getenv("ALSO")){int f=open(path,O_RDWR); if(syscall(__NR_io_uring_register,r,IORING_REGISTER_FILES,&f,1)){perror("reg2");_exit(1);}}
  void*b;posix_memalign(&b,4096,1<<18);memset(b,7,1<<18);
  unsigned*tail=(unsigned*)(sq+p.sq_off.tail),*mask=(unsigned*)(sq+p.sq_off.ring_mask),*arr=(unsigned*)(sq+p.sq_off.array);
  unsigned*ch=(unsigned*)(cq+p.cq_off.head),*ct=(unsigned*)(cq+p.cq_off.tail);
  int in=0;unsigned n=0; write(pw,"x",1);
  if(!load) for(;;) pause();
  for(;;){ int add=0;
    while(in<8){unsigned i=*tail&*mask;struct io_uring_sqe*s=&sqes[i];memset(s,0,sizeof*s);
      s->opcode=IORING_OP_WRITE;s->fd=fixed?0:fd;s->flags=fixed?IOSQE_FIXED_FILE:0;s->addr=(unsigned long)b;s->len=1<<16;s->off=(unsigned long)((n++*7919)%500)<<16;
      arr[i]=i;__atomic_store_n(tail,*tail+1,__ATOMIC_RELEASE);in++;add++;}
    syscall(__NR_io_uring_enter,r,add,1,IORING_ENTER_GETEVENTS,0,0);
    while(*ch!=__atomic_load_n(ct,__ATOMIC_ACQUIRE)){__atomic_store_n(ch,*ch+1,__ATOMIC_RELEASE);in--;}
  }}
static int cmp(const void*a,const void*b){double x=*(double*)a,y=*(double*)b;return x<y?-1:x>y;}
int main(int c,char**v){int fixed=atoi(v[2]),load=atoi(v[3]),n=atoi(v[4]);double t[1000],w[1000];
 for(int i=0;i<n;i++){int pp[2];pipe2(pp,O_CLOEXEC);
  int pid=fork(); if(!pid){close(pp[0]); int fd=open(v[1],O_RDWR|O_CREAT|O_DIRECT,0600); if(fd<0){perror("open");_exit(1);} ftruncate(fd,64<<20);
    struct flock l={.l_type=F_WRLCK,.l_whence=0,.l_start=1000,.l_len=1}; if(fcntl(fd,F_OFD_SETLK,&l)){perror("lock");_exit(1);} child(v[1],fixed,load,pp[1],fd);}
  close(pp[1]); char x; if(read(pp[0],&x,1)!=1) return 1; usleep(60000+rand()%20000);
  int fd=open(v[1],O_RDWR); double a=now(); kill(pid,9);
  if(fixed){while(read(pp[0],&x,1)>0);}
  else {struct flock l={.l_type=F_WRLCK,.l_whence=0,.l_start=1000,.l_len=1}; if(fcntl(fd,F_OFD_SETLKW,&l)) perror("wait");}
  t[i]=now()-a; waitpid(pid,0,0); w[i]=now()-a; close(fd); close(pp[0]);}
 qsort(t,n,8,cmp);qsort(w,n,8,cmp);printf("fixed=%d load=%d n=%d settled p50 %.2f p90 %.2f max %.2f ms; reaped p50 %.2f max %.2f\n",fixed,load,n,t[n/2],t[n*9/10],t[n-1],w[n/2],w[n-1]);}
