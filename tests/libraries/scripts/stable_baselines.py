import json
import sys

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.evaluation import evaluate_policy

kind, settings = {"PPO": (PPO, {"n_steps": 64, "batch_size": 32, "n_epochs": 2}), "DQN": (DQN, {"learning_starts": 32, "batch_size": 16})}[sys.argv[1]]
model = kind("MlpPolicy", "CartPole-v1", seed=0, device="cpu", policy_kwargs={"net_arch": [8]}, **settings)
model.learn(192)
model.save("model")
again = kind.load("model", env=model.get_env())
mean, deviation = evaluate_policy(again, again.get_env(), n_eval_episodes=2)
print("RESULT", json.dumps({"mean": float(mean), "deviation": float(deviation)}))
torch.save(again.policy.state_dict(), "final.pt")
