"""A function, a layer, a network. On a CPU, where modelnew is PyTorch's own convolution, this runs as well."""

import torch
from torch import nn

import modelnew

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 64, 56, 56, device=device)

# A function: the arguments of torch.nn.functional.conv2d.
weight = torch.randn(128, 64, 3, 3, device=device, requires_grad=True)
y = modelnew.conv2d(x, weight, padding=1)
y.sum().backward()
print("conv2d:", tuple(y.shape), "gradient:", tuple(weight.grad.shape))
print(modelnew.explain(x, weight, padding=1))  # which engine computes each pass, how exactly, and why

# A layer: the arguments, parameters and state_dict of torch.nn.Conv2d.
theirs = nn.Conv2d(64, 128, 3, padding=1, device=device)
ours = modelnew.Conv2d(64, 128, 3, padding=1, device=device)
ours.load_state_dict(theirs.state_dict())
print("layer: largest difference to nn.Conv2d", (ours(x) - theirs(x)).abs().max().item())

# A network: every nn.Conv2d that gains by it is replaced, in place.
network = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 10, 1)).to(device).eval()
network, report = modelnew.accelerate(network, x)
print(report)
modelnew.restore(network)  # and back
