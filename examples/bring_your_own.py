"""Your own network and your own arrays: digits 0 to 4 on fifty clients, 5 to 9 at the server, one model for both."""

import torch
from sklearn.datasets import load_digits

import mixfed

images, labels = load_digits(return_X_y=True)
fields = {"x": torch.tensor(images / 16, dtype=torch.float32), "y": torch.tensor(labels)}
train, test = ({name: x[part] for name, x in fields.items()} for part in (slice(0, 1400), slice(1400, None)))
on_clients = train["y"] < 5
clients = mixfed.FederatedData.from_arrays(
    {name: x[on_clients] for name, x in train.items()}, clients=torch.arange(int(on_clients.sum())) % 50
)
centre = mixfed.CentralData.from_arrays({name: x[~on_clients] for name, x in train.items()})

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = mixfed.Model(network, mixfed.cross_entropy)
on_device = mixfed.LocalTrainer(model, mixfed.sgd(0.1), mixfed.Batching(10, steps=5))
at_centre = mixfed.LocalTrainer(model, mixfed.sgd(0.1), mixfed.Batching(50, steps=5))
evaluate = mixfed.evaluator(model, mixfed.CentralData.from_arrays(test))

for algorithm in (mixfed.fedavg(on_device), mixfed.gradient_2way(on_device, at_centre)):
    result = mixfed.run(algorithm, clients, central=centre, rounds=60, cohort=10, evaluate=evaluate, every=20)
    print(f"{algorithm.name}: accuracy {result.metrics['accuracy']:.3f}, {result.ledger['bytes_up']:,} bytes sent up")
