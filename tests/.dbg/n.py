import sys, torch, time
from commbackend.testing import run_ranks
def f(rank, group, mode):
    from commbackend.transports import torch_dist as td
    import contextlib
    from torch._C import _distributed_c10d as c
    torch.cuda.set_device(rank)
    o=c.ProcessGroupNCCL.Options()
    dev=torch.device("cuda",rank)
    if mode=="days": o._timeout=td._FOR_EVER
    bad=[]
    for i in range(6):
        pg=c.ProcessGroupNCCL(group.scope("x"),rank,2,o)
        for j in range(3):
            found=torch.zeros(2,dtype=torch.int32,device=dev); mine=torch.full((1,),rank+1,dtype=torch.int32,device=dev)
            ctx=torch.cuda.stream(torch.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream,device=dev)) if mode!="plain" else contextlib.nullcontext()
            with ctx:
                outs=[x.view(-1).view(torch.uint8) for x in found.split(1)]; ins=[mine.view(-1).view(torch.uint8)]*2
                w=pg.alltoall(outs,ins)
                w.wait()
            if mode=="sync": torch.cuda.synchronize()
            a=found.tolist(); torch.cuda.synchronize(); time.sleep(.2); b=found.tolist()
            if a!=[1,2]: bad.append((i,j,a,b,type(w)))
        pg.shutdown()
    return bad
if __name__=="__main__":
    for m in ("days","ext","plain","sync"): print(m, run_ranks(f,2,m,timeout_s=90))
