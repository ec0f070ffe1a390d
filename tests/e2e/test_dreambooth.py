"""A subject is learnt on the cluster from five pictures, though the trainer's pod is killed on the way."""

from tests.e2e import jobs, site
from tests.e2e.kube import Kube
from tests.e2e.test_trouble import LONGER_S, at_work, kill, pod_of

PICTURES = 5
PAINT = f"""
import io, os, boto3
from scripts.demo.shapes import render, sample
s3 = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
for number in range({PICTURES}):
    file = io.BytesIO()
    render(sample(number), 128).save(file, "png")
    s3.put_object(Bucket="sdp", Key=f"subject/{{number}}.png", Body=file.getvalue())
"""


def test_dreambooth_ends_whole_though_its_trainer_is_killed(cluster: Kube) -> None:
    cluster.python(site.TOOLS, PAINT)
    job = jobs.create(cluster, "dreambooth")
    at_work(cluster, "dreambooth/run")
    kill(cluster, pod_of(cluster, "a100"))
    jobs.succeeded(cluster, job, LONGER_S)
    output = f"{jobs.OUTPUT}/dreambooth"
    run = jobs.inspect(cluster, f"{output}/run")
    assert run["step"] == 120
    assert run["history"]["recovered"] >= 1
    counts = {
        name: jobs.inspect(cluster, f"{output}/{name}")["counts"]["written"]
        for name in ("subject-latents", "class-latents")
    }
    assert counts == {"subject-latents": PICTURES, "class-latents": 12}
    assert "e2e/dreambooth/report.html" in site.keys(cluster, "e2e/dreambooth/report")
    assert len([key for key in site.keys(cluster, "e2e/dreambooth/pictures/images/") if key.endswith(".png")]) == 4
