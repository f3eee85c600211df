"""REINFORCE on a hand-made cart with a pole: no loader, episodes of different length."""

from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

gamma = 0.8
num_episodes = 60


class CartPole:
    """The physics of the classic environment; an episode ends when the pole or the cart is too far out, or after 60 steps."""

    def reset(self):
        self.state = np.random.uniform(-0.05, 0.05, 4)
        self.steps = 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = 10.0 if action == 1 else -10.0
        temp = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
        theta_acc = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * np.cos(theta) / 1.1
        self.state += 0.02 * np.array([x_dot, x_acc, theta_dot, theta_acc])
        self.steps += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.steps >= 60
        return self.state.astype(np.float32), 1.0, bool(done)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.affine2 = nn.Linear(64, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


def select_action(state):
    m = Categorical(policy(torch.from_numpy(state).unsqueeze(0)))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.cat([-log_prob * R for log_prob, R in zip(policy.saved_log_probs, returns)]).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]


np.random.seed(1)
torch.manual_seed(1)
env = CartPole()
policy = model = Policy()
optimizer = optim.Adam(policy.parameters(), lr=5e-3)
for i_episode in range(num_episodes):
    state, ep_reward = env.reset(), 0
    for t in count(1):
        state, reward, done = env.step(select_action(state))
        policy.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    finish_episode()
    if i_episode % 20 == 0:
        print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}")

# a single number that does not depend on luck: does the policy push towards the side to which the pole falls?
with torch.no_grad():
    falling = torch.cat([torch.linspace(-0.2, -0.05, 20), torch.linspace(0.05, 0.2, 20)])
    states = torch.stack([torch.zeros(40), torch.zeros(40), falling, 3 * falling], dim=1)
    right = policy(states).argmax(dim=1) == (falling > 0).long()
print(f"accuracy {right.float().mean().item():.4f}")
