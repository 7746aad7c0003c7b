"""The models of the benches, the same as in `examples/src/bin/flow-bench/models.rs`: each with the shape of a batch."""

import torch.nn.functional as F
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), (50, 784)


def lenet():
    layers = [nn.Conv2d(1, 32, 5, padding=2), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5, padding=2), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), (50, 1, 28, 28)


def wide():
    layers = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), (32, 2048)


def conv_bn_relu6(inputs, outputs, size, stride=1, groups=1):
    conv = nn.Conv2d(inputs, outputs, size, stride, (size - 1) // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6()]


class InvertedResidual(nn.Module):
    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        hidden = inputs * expansion
        layers = conv_bn_relu6(inputs, hidden, 1) if expansion != 1 else []
        layers += conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


def mobilenet():
    """MobileNetV2 (Sandler et al. 2018), width 1."""
    layers, channels = conv_bn_relu6(3, 32, 3, stride=2), 32
    settings = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    for expansion, outputs, repeats, stride in settings:
        for i in range(repeats):
            layers.append(InvertedResidual(channels, outputs, stride if i == 0 else 1, expansion))
            channels = outputs
    layers += conv_bn_relu6(channels, 1280, 1)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 10)]
    return nn.Sequential(*layers), (32, 3, 32, 32)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.downsample = nn.Sequential()
        if inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return F.relu(self.downsample(x) + self.layers(x))


def resnet50():
    """ResNet-50 (He et al. 2015), with the stride in the 3 x 3 convolution."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, repeats, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for i in range(repeats):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers), (32, 3, 224, 224)


class Gpt(nn.Module):
    """A block of GPT-2 (Radford et al. 2019); classes are predicted from the mean over all tokens."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.classes = nn.Linear(width, 10)

    def attention(self, qkv):
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.view(batch, tokens, self.heads, 3, -1).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, tokens, -1)

    def forward(self, x):
        x = x + self.projection(self.attention(self.qkv(self.norm1(x))))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.classes(x.mean(1))


def gpt():
    return Gpt(1024, 16), (8, 1024, 1024)


MODELS = {"mlp": mlp, "lenet": lenet, "wide": wide, "mobilenet": mobilenet, "resnet50": resnet50, "gpt": gpt}
