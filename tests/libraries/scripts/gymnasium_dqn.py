import json
import math
import random
from collections import deque, namedtuple

import gymnasium as gym
import torch
from torch import nn, optim

random.seed(0)
torch.manual_seed(0)
env = gym.make("CartPole-v1")
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class DQN(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(observations, 32), nn.Linear(32, 32), nn.Linear(32, actions)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


policy_net, target_net = DQN(4, 2), DQN(4, 2)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=3e-4, amsgrad=True)
memory = deque([], maxlen=1000)
steps_done = 0


def select_action(state):
    global steps_done
    threshold = 0.05 + 0.85 * math.exp(-steps_done / 200)
    steps_done += 1
    if random.random() > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[env.action_space.sample()]], dtype=torch.long)


def optimize_model():
    if len(memory) < 32:
        return
    batch = Transition(*zip(*random.sample(memory, 32), strict=True))
    non_final = torch.tensor([state is not None for state in batch.next_state])
    values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    following = torch.zeros(32)
    with torch.no_grad():
        following[non_final] = target_net(torch.cat([state for state in batch.next_state if state is not None])).max(1).values
    loss = nn.SmoothL1Loss()(values, (following * 0.99 + torch.cat(batch.reward)).unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for episode in range(8):
    observation, _ = env.reset(seed=0 if episode == 0 else None)
    state = torch.tensor(observation).unsqueeze(0)
    env.action_space.seed(episode)
    duration, done = 0, False
    while not done:
        action = select_action(state)
        observation, reward, terminated, truncated, _ = env.step(action.item())
        done = terminated or truncated
        next_state = None if terminated else torch.tensor(observation).unsqueeze(0)
        memory.append(Transition(state, action, next_state, torch.tensor([reward])))
        state = next_state
        optimize_model()
        policy, target = policy_net.state_dict(), target_net.state_dict()
        target_net.load_state_dict({key: policy[key] * 0.005 + target[key] * 0.995 for key in policy})
        duration += 1
    print("RESULT", json.dumps({"episode": episode, "duration": duration}))
torch.save({**policy_net.state_dict(), **{f"target.{key}": value for key, value in target_net.state_dict().items()}}, "final.pt")
